// Programmatic dependent launch (PTX ISA 8.0, griddepcontrol).
#pragma once
#include "types.cuh"

// Lets the next launch start, if it uses programmatic dependent launch; it waits by itself for what this one writes.
INLINE void let_next_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
// Waits until the launches before this one have ended and their writes are visible.
INLINE void wait_for_launches() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
