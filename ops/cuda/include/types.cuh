// Integers of fixed widths, for which NVRTC has no <stdint.h>, and the attribute of every function of these headers.
#pragma once

using int32_t = int;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;

#define INLINE __device__ __forceinline__
