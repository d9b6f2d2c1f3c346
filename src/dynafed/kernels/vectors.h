// Vectors of `lanes` numbers, whatever the processor's own are: where those are smaller, a vector is made of two halves,
// and so on. Each lane is computed as in one whole vector, so the bits are the same; but compilers take 64 bytes apart lane
// by lane where the processor has no such vector, which is many times slower.

#pragma once

#include <type_traits>

#if defined(__AVX512F__)
constexpr int VECTOR_BYTES = 64;
#elif defined(__AVX__)
constexpr int VECTOR_BYTES = 32;
#else
constexpr int VECTOR_BYTES = 16;
#endif

template <class Half> struct Pair {
    Half low, high;

    Pair operator-() const { return {-low, -high}; }
    template <class Other> Pair &operator+=(const Other &b) { return *this = *this + b; }
    template <class Other> Pair &operator-=(const Other &b) { return *this = *this - b; }
    template <class Other> Pair &operator*=(const Other &b) { return *this = *this * b; }
    template <class Other> Pair &operator/=(const Other &b) { return *this = *this / b; }

    auto operator[](long lane) const {
        constexpr long half = sizeof(Half) / sizeof(low[0]);
        return lane < half ? low[lane] : high[lane - half];
    }
};

template <class R, int lanes, bool whole = lanes * sizeof(R) <= VECTOR_BYTES> struct Vector {
    typedef R type __attribute__((vector_size(lanes * sizeof(R)), aligned(sizeof(R)), may_alias));

    static type load(const R *at) { return *(const type *)at; }
    static void store(R *at, type value) { *(type *)at = value; }
};

template <class R, int lanes> struct Vector<R, lanes, false> {
    typedef Vector<R, lanes / 2> Half;
    typedef Pair<typename Half::type> type;

    static type load(const R *at) { return {Half::load(at), Half::load(at + lanes / 2)}; }
    static void store(R *at, const type &value) {
        Half::store(at, value.low);
        Half::store(at + lanes / 2, value.high);
    }
};

// The lanes of `a` where the comparison holds, else those of `b`.
template <class Mask, class T> inline T pick(const Mask &mask, const T &a, const T &b) { return mask ? a : b; }
template <class Mask, class Half> inline Pair<Half> pick(const Pair<Mask> &mask, const Pair<Half> &a, const Pair<Half> &b) {
    return {pick(mask.low, a.low, b.low), pick(mask.high, a.high, b.high)};
}

// With another vector, or with one number for all lanes.
#define OPERATOR(OP)                                                                                                     \
    template <class Half> inline auto operator OP(const Pair<Half> &a, const Pair<Half> &b) {                            \
        return Pair<decltype(a.low OP b.low)>{a.low OP b.low, a.high OP b.high};                                         \
    }                                                                                                                    \
    template <class Half, class R, class = std::enable_if_t<std::is_arithmetic<R>::value>>                               \
    inline auto operator OP(const Pair<Half> &a, R b) {                                                                  \
        return Pair<decltype(a.low OP b)>{a.low OP b, a.high OP b};                                                      \
    }                                                                                                                    \
    template <class Half, class R, class = std::enable_if_t<std::is_arithmetic<R>::value>>                               \
    inline auto operator OP(R a, const Pair<Half> &b) {                                                                  \
        return Pair<decltype(a OP b.low)>{a OP b.low, a OP b.high};                                                      \
    }
OPERATOR(+)
OPERATOR(-)
OPERATOR(*)
OPERATOR(/)
OPERATOR(>)
OPERATOR(<)
OPERATOR(!=)
OPERATOR(|)
#undef OPERATOR
