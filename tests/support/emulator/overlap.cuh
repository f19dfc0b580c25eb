// The CPU's version of ops/cuda/include/overlap.cuh, whose functions the scheduler in cuda.h has.
#pragma once
#include "cuda.h"
