// The CPU's version of ops/cuda/include/types.cuh.
#pragma once
#include <stdint.h>

#define INLINE inline
