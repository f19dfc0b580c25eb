// The functions of ops/cuda/include/overlap.cuh for the CPU, which the scheduler has.
#pragma once
#include "cuda.h"
