// The functions that are marked as LINKED, of all headers of the emulator.
#define RUNTIME
#include "cluster.cuh"
#include "convert.cuh"
#include "cuda.h"
#include "hopper.cuh"
#include "instructions.cuh"
#include "mma.cuh"
