// The macros OUT and BIAS of products as types: `OutType` and `BiasType`. Included by convert.cuh.
#pragma once
#include "element.cuh"

template <Element KIND>
struct TypeOf {
    using type = float;
};
template <>
struct TypeOf<Element::BF16> {
    using type = Bf16;
};
template <>
struct TypeOf<Element::FP16> {
    using type = Fp16;
};

#ifdef OUT
constexpr bool HAS_BIAS = Element(BIAS) != Element::NONE;
using OutType = TypeOf<OUT>::type;
using BiasType = TypeOf<Element(BIAS)>::type;
#endif
