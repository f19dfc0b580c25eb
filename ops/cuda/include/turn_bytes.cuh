// A transposition of bytes in registers.
#pragma once
#include "types.cuh"

// Transposes 4 x 4 bytes: bytes c of four words become word c.
INLINE void turn_bytes(uint32_t w0, uint32_t w1, uint32_t w2, uint32_t w3, uint32_t (&turned)[4]) {
    const uint32_t low01 = __byte_perm(w0, w1, 0x5140), high01 = __byte_perm(w0, w1, 0x7362);
    const uint32_t low23 = __byte_perm(w2, w3, 0x5140), high23 = __byte_perm(w2, w3, 0x7362);
    turned[0] = __byte_perm(low01, low23, 0x5410);
    turned[1] = __byte_perm(low01, low23, 0x7632);
    turned[2] = __byte_perm(high01, high23, 0x5410);
    turned[3] = __byte_perm(high01, high23, 0x7632);
}
