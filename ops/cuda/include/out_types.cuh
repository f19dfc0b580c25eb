// The macros OUT and BIAS as types: names of element types, and `OutType` and `BiasType`. Included by convert.cuh.
#pragma once

#define BF16 1
#define FP16 2
#define FP32 3

#if defined(OUT)
#if OUT == BF16
using OutType = Bf16;
#elif OUT == FP16
using OutType = Fp16;
#else
using OutType = float;
#endif
#if BIAS == BF16
using BiasType = Bf16;
#elif BIAS == FP16
using BiasType = Fp16;
#else
using BiasType = float;
#endif
#endif
