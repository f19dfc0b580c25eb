"""The quantizers in CUDA C++: each kernel's launch beside its source."""
