// Type traits and numeric limits.
#pragma once
#include "msl/vectors.h"

namespace metal {
template <bool B, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> {
  typedef T type;
};
template <bool B, class T = void>
using enable_if_t = typename enable_if<B, T>::type;

template <class T, T V>
struct integral_constant {
  static constexpr T value = V;
  typedef T value_type;
  typedef integral_constant type;
  constexpr operator T() const { return V; }
};
template <bool B>
using bool_constant = integral_constant<bool, B>;
typedef bool_constant<true> true_type;
typedef bool_constant<false> false_type;

template <class...>
struct _disjunction : false_type {};
template <class B, class... R>
struct _disjunction<B, R...> : bool_constant<B::value || _disjunction<R...>::value> {};

template <class A, class B>
struct is_same : false_type {};
template <class A>
struct is_same<A, A> : true_type {};
template <class A, class B>
constexpr bool is_same_v = is_same<A, B>::value;

template <bool B, class T, class U>
struct conditional {
  typedef T type;
};
template <class T, class U>
struct conditional<false, T, U> {
  typedef U type;
};
template <bool B, class T, class U>
using conditional_t = typename conditional<B, T, U>::type;

template <class A, class B>
struct is_convertible : bool_constant<__is_convertible_to(A, B)> {};
template <class A, class B>
constexpr bool is_convertible_v = is_convertible<A, B>::value;

template <class T>
struct remove_reference {
  typedef T type;
};
template <class T>
struct remove_reference<T&> {
  typedef T type;
};
template <class T>
using remove_reference_t = typename remove_reference<T>::type;
template <class T>
struct remove_cv {
  typedef __remove_cv(T) type;
};
template <class T>
using remove_cv_t = typename remove_cv<T>::type;

#ifdef EMU_CHECK
template <class T>
struct remove_addrspace {
  typedef T type;
};
template <class T>
struct remove_addrspace<device T> {
  typedef T type;
};
template <class T>
struct remove_addrspace<constant T> {
  typedef T type;
};
template <class T>
struct remove_addrspace<threadgroup T> {
  typedef T type;
};
template <class T>
using remove_addrspace_t = typename remove_addrspace<T>::type;
#else
template <class T>
using remove_addrspace_t = __remove_cv(T);
#endif

template <class T>
struct is_floating_point
    : bool_constant<is_same_v<remove_cv_t<T>, float> || is_same_v<remove_cv_t<T>, half> ||
                    is_same_v<remove_cv_t<T>, bfloat>> {};
template <class T>
constexpr bool is_floating_point_v = is_floating_point<T>::value;
template <class T>
struct is_integral : bool_constant<__is_integral(T)> {};
template <class T>
constexpr bool is_integral_v = is_integral<T>::value;
template <class T>
constexpr bool is_signed_v = __is_signed(T);
template <class T>
constexpr bool is_unsigned_v = __is_unsigned(T);

template <class T>
struct numeric_limits {
  static constexpr bool is_signed = T(-1) < T(0);
  static constexpr int digits = sizeof(T) * 8 - is_signed;
  static constexpr T max() { return is_signed ? T((1ull << (sizeof(T) * 8 - 1)) - 1) : T(~0ull); }
  static constexpr T min() { return is_signed ? T(1ull << (sizeof(T) * 8 - 1)) : T(0); }
  static constexpr T lowest() { return min(); }
};
template <>
struct numeric_limits<bool> {
  static constexpr bool max() { return true; }
  static constexpr bool min() { return false; }
};

#define EMU_FLOAT_LIMITS(T, MAX, MIN, EPSILON)                       \
  template <>                                                        \
  struct numeric_limits<T> {                                         \
    static constexpr T max() { return (T)MAX; }                      \
    static constexpr T lowest() { return (T) - MAX; }                \
    static constexpr T min() { return (T)MIN; }                      \
    static constexpr T epsilon() { return (T)EPSILON; }              \
    static constexpr T infinity() { return (T)__builtin_inff(); }    \
    static constexpr T quiet_NaN() { return (T)__builtin_nanf(""); } \
  };
EMU_FLOAT_LIMITS(float, 3.40282347e38f, 1.17549435e-38f, 1.1920929e-7f)
EMU_FLOAT_LIMITS(half, 65504.0f, 6.103515625e-5f, 9.765625e-4f)
EMU_FLOAT_LIMITS(bfloat, 3.38953139e38f, 1.17549435e-38f, 7.8125e-3f)
}  // namespace metal

#undef INFINITY
#undef NAN
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define FLT_MAX 3.40282347e38f
#define FLT_MIN 1.17549435e-38f
#define FLT_EPSILON 1.1920929e-7f
#define HALF_MAX 65504.0f
#define M_PI_F 3.14159265f
#define M_LOG2E_F 1.44269504f
#define M_LN2_F 0.69314718f
#define M_E_F 2.71828183f
