// Launches that overlap on a stream (PTX ISA 8.0, griddepcontrol).
#pragma once
#include "types.cuh"

// The launch after this one may begin, where it was made to: it waits by itself for what this one writes.
INLINE void let_next_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
// Until the launches before this one have ended and what they wrote is seen.
INLINE void wait_for_launches() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
