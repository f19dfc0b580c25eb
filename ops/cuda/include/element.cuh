// The element types in which the macros INPUT, OUT and BIAS are given.
#pragma once
#include "types.cuh"

enum class Element { NONE, BF16, FP16, FP32 };  // NONE, which 0 is too: there is no such tensor
