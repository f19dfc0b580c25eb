// The types of ops/cuda/include/types.cuh for the CPU.
#pragma once
#include <stdint.h>

#define INLINE inline
