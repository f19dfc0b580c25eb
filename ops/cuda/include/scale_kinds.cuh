// The kinds of scales of an operand, in which the macros SCALE, A_SCALE and B_SCALE are given. They are numbers of the
// preprocessor, since they choose parameters of kernels and their types.
#pragma once

#define WHOLE 0  // one scale
#define LINE 1  // one for each row of a or column of b, for all of K
#define VECTOR 2  // one for each row of a or column of b and 128 of K
#define BLOCK 3  // one for 128 rows of a or columns of b and 128 of K
