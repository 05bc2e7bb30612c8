// Stand-in for <torch/extension.h> that compiles about a hundred times faster than the real one.
//
// It declares the part of the C++ API that hand-written CPU kernels use: shapes, raw data, allocation, checks.
// Anything else does not compile here, on purpose, and the candidate goes on to the real headers: a light type
// refuses what it does not implement, it never drops an option silently. What it accepts is checked again by a
// parse against the real headers (build.py), so this file can be stricter than torch but never laxer.
#pragma once
#include <algorithm>
#include <array>
#include <cfloat>
#include <climits>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <limits>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "../../abi.h"

// Inline namespaces give these types their own linker names: libtorch, loaded in the same process, has others.
namespace c10 {
inline namespace musa_abi {
enum class ScalarType : int8_t { Byte, Char, Short, Int, Long, Half, Float, Double, ComplexHalf, ComplexFloat, ComplexDouble, Bool };

class Error : public std::exception {
 public:
  explicit Error(std::string text) : text_(std::move(text)) {}
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  std::string text_;
};

[[noreturn]] inline void musa_raise() { throw Error(musa_last_error()); }

inline std::string musa_text(const char* v) { return v; }
inline std::string musa_text(const std::string& v) { return v; }
template <class T, class = std::enable_if_t<std::is_arithmetic_v<T>>>
std::string musa_text(T v) { return std::to_string(v); }
template <class... A>
[[noreturn]] void musa_check_failed(const char* condition, const A&... parts) {
  std::string text;
  ((text += musa_text(parts)), ...);
  if (text.empty()) text = std::string("Expected ") + condition + " to be true, but got false.";
  throw Error(text);
}

// A view of sizes; like torch's it does not own them.
class IntArrayRef {
 public:
  IntArrayRef() = default;
  IntArrayRef(const int64_t* data, size_t size) : data_(data), size_(size) {}
  IntArrayRef(const std::vector<int64_t>& v) : data_(v.data()), size_(v.size()) {}
  IntArrayRef(const std::initializer_list<int64_t>& v) : data_(v.begin()), size_(v.size()) {}
  const int64_t* data() const { return data_; }
  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  const int64_t* begin() const { return data_; }
  const int64_t* end() const { return data_ + size_; }
  const int64_t& operator[](size_t i) const { return data_[i]; }
  const int64_t& front() const { return data_[0]; }
  const int64_t& back() const { return data_[size_ - 1]; }
  std::vector<int64_t> vec() const { return {begin(), end()}; }
  bool equals(IntArrayRef other) const { return size_ == other.size_ && std::equal(begin(), end(), other.begin()); }
  friend bool operator==(IntArrayRef a, IntArrayRef b) { return a.equals(b); }
  friend bool operator!=(IntArrayRef a, IntArrayRef b) { return !a.equals(b); }

 private:
  const int64_t* data_ = nullptr;
  size_t size_ = 0;
};
}  // namespace musa_abi
}  // namespace c10

namespace at {
inline namespace musa_abi {
using c10::IntArrayRef;
using c10::ScalarType;
constexpr ScalarType kByte = ScalarType::Byte, kChar = ScalarType::Char, kShort = ScalarType::Short, kInt = ScalarType::Int,
                     kLong = ScalarType::Long, kFloat = ScalarType::Float, kDouble = ScalarType::Double, kBool = ScalarType::Bool;

template <class T> struct musa_scalar;
template <> struct musa_scalar<uint8_t> { static constexpr ScalarType value = kByte; };
template <> struct musa_scalar<int8_t> { static constexpr ScalarType value = kChar; };
template <> struct musa_scalar<int16_t> { static constexpr ScalarType value = kShort; };
template <> struct musa_scalar<int32_t> { static constexpr ScalarType value = kInt; };
template <> struct musa_scalar<int64_t> { static constexpr ScalarType value = kLong; };
template <> struct musa_scalar<float> { static constexpr ScalarType value = kFloat; };
template <> struct musa_scalar<double> { static constexpr ScalarType value = kDouble; };
template <> struct musa_scalar<bool> { static constexpr ScalarType value = kBool; };

inline const char* musa_scalar_name(ScalarType t) {
  static const char* names[] = {"Byte", "Char", "Short", "Int", "Long", "Half", "Float", "Double", "ComplexHalf", "ComplexFloat", "ComplexDouble", "Bool"};
  const int i = static_cast<int>(t);
  return i >= 0 && i < 12 ? names[i] : "other";
}

// Only a dtype: this backend has one device and one layout, and every other option is left to the real header.
class TensorOptions {
 public:
  TensorOptions(ScalarType dtype) : dtype_(dtype) {}
  TensorOptions dtype(ScalarType t) const { return TensorOptions(t); }
  ScalarType musa_dtype() const { return dtype_; }

 private:
  ScalarType dtype_;
};

class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(musa_tensor* owned) : p_(owned) {}
  Tensor(const Tensor& o) : p_(o.p_) { if (p_) ::musa_retain(p_); }
  Tensor(Tensor&& o) noexcept : p_(o.p_) { o.p_ = nullptr; }
  Tensor& operator=(Tensor o) noexcept { std::swap(p_, o.p_); return *this; }
  ~Tensor() { if (p_) ::musa_release(p_); }

  bool defined() const { return p_ != nullptr; }
  int64_t dim() const { return ::musa_dim(get()); }
  int64_t ndimension() const { return dim(); }
  int64_t numel() const { return ::musa_numel(get()); }
  IntArrayRef sizes() const { return {::musa_sizes(get()), static_cast<size_t>(dim())}; }
  IntArrayRef strides() const { return {::musa_strides(get()), static_cast<size_t>(dim())}; }
  int64_t size(int64_t d) const { return sizes()[wrap(d)]; }
  int64_t stride(int64_t d) const { return strides()[wrap(d)]; }
  ScalarType scalar_type() const { return static_cast<ScalarType>(::musa_dtype(get())); }
  TensorOptions options() const {
    if (!is_cpu()) throw c10::Error("the cpu backend allocates CPU tensors only");
    return TensorOptions(scalar_type());
  }
  bool is_cpu() const { return ::musa_is_cpu(get()) != 0; }
  bool is_contiguous() const { return ::musa_is_contiguous(get()) != 0; }
  Tensor contiguous() const { return own(::musa_contiguous(get())); }
  Tensor clone() const { return own(::musa_clone(get())); }
  Tensor view(IntArrayRef s) const { return own(::musa_view(get(), s.data(), static_cast<int64_t>(s.size()))); }
  Tensor transpose(int64_t a, int64_t b) const { return own(::musa_transpose(get(), a, b)); }
  void* data_ptr() const { return ::musa_data(get()); }
  template <class T> T* data_ptr() const {
    using U = std::remove_const_t<T>;
    if (scalar_type() != musa_scalar<U>::value)
      throw c10::Error(std::string("expected scalar type ") + musa_scalar_name(musa_scalar<U>::value) + " but found " + musa_scalar_name(scalar_type()));
    return static_cast<T*>(::musa_data(get()));
  }
  template <class T> const T* const_data_ptr() const { return data_ptr<T>(); }
  template <class T> T* mutable_data_ptr() const { return data_ptr<T>(); }

  musa_tensor* musa_handle() const { return p_; }
  static Tensor own(musa_tensor* p) {
    if (!p) c10::musa_raise();
    return Tensor(p);
  }

 private:
  musa_tensor* get() const {
    if (!p_) throw c10::Error("tensor is undefined");
    return p_;
  }
  size_t wrap(int64_t d) const {
    const int64_t n = dim();
    if (d < -n || d >= n) {
      ::musa_set_error("Dimension out of range", 3);
      throw std::out_of_range("Dimension out of range (expected to be in range of [" + std::to_string(-n) + ", " + std::to_string(n - 1) +
                              "], but got " + std::to_string(d) + ")");
    }
    return static_cast<size_t>(d < 0 ? d + n : d);
  }
  musa_tensor* p_ = nullptr;
};

inline Tensor musa_make(IntArrayRef s, TensorOptions o, int32_t fill) {
  return Tensor::own(::musa_new(s.data(), static_cast<int64_t>(s.size()), static_cast<int32_t>(o.musa_dtype()), fill));
}
inline Tensor empty(IntArrayRef s, TensorOptions o = kFloat) { return musa_make(s, o, -1); }
inline Tensor zeros(IntArrayRef s, TensorOptions o = kFloat) { return musa_make(s, o, 0); }
inline Tensor ones(IntArrayRef s, TensorOptions o = kFloat) { return musa_make(s, o, 1); }
inline Tensor empty_like(const Tensor& t) { return Tensor::own(::musa_new_like(t.musa_handle(), -1)); }
inline Tensor zeros_like(const Tensor& t) { return Tensor::own(::musa_new_like(t.musa_handle(), 0)); }
}  // namespace musa_abi
}  // namespace at

namespace torch {
inline namespace musa_abi {
using at::empty;
using at::empty_like;
using at::IntArrayRef;
using at::ones;
using at::ScalarType;
using at::Tensor;
using at::TensorOptions;
using at::zeros;
using at::zeros_like;
using at::kByte;
using at::kChar;
using at::kShort;
using at::kInt;
using at::kLong;
using at::kFloat;
using at::kDouble;
using at::kBool;
constexpr ScalarType kUInt8 = at::kByte, kInt8 = at::kChar, kInt16 = at::kShort, kInt32 = at::kInt, kInt64 = at::kLong, kFloat32 = at::kFloat, kFloat64 = at::kDouble;
constexpr ScalarType kF32 = at::kFloat, kF64 = at::kDouble;
}  // namespace musa_abi
}  // namespace torch

#define TORCH_CHECK(cond, ...) \
  do { if (!(cond)) ::c10::musa_check_failed(#cond __VA_OPT__(,) __VA_ARGS__); } while (0)

// Argument and result conversion for `functions=[...]`: the light path's replacement for pybind11.
namespace musa_light {
struct TypeMismatch : std::exception {};

template <class T, class = void> struct Arg;
template <> struct Arg<at::Tensor> {
  static at::Tensor read(const musa_value& v) {
    if (v.tag == MUSA_NONE) return {};
    if (v.tag != MUSA_TENSOR) throw TypeMismatch();
    ::musa_retain(v.tensor);
    return at::Tensor(v.tensor);
  }
};
template <> struct Arg<bool> {
  static bool read(const musa_value& v) {
    if (v.tag != MUSA_BOOL) throw TypeMismatch();
    return v.i != 0;
  }
};
template <class T> struct Arg<T, std::enable_if_t<std::is_integral_v<T> && !std::is_same_v<T, bool>>> {
  static T read(const musa_value& v) {
    if (v.tag != MUSA_INT && v.tag != MUSA_BOOL) throw TypeMismatch();
    if (v.i < static_cast<int64_t>(std::numeric_limits<T>::min()) || (sizeof(T) < 8 && v.i > static_cast<int64_t>(std::numeric_limits<T>::max())))
      throw TypeMismatch();
    return static_cast<T>(v.i);
  }
};
template <class T> struct Arg<T, std::enable_if_t<std::is_floating_point_v<T>>> {
  static T read(const musa_value& v) {
    if (v.tag == MUSA_DOUBLE) return static_cast<T>(v.d);
    if (v.tag == MUSA_INT || v.tag == MUSA_BOOL) return static_cast<T>(v.i);
    throw TypeMismatch();
  }
};
template <class T> struct Arg<std::vector<T>> {
  static std::vector<T> read(const musa_value& v) {
    if (v.tag != MUSA_LIST && v.tag != MUSA_TUPLE) throw TypeMismatch();
    std::vector<T> out;
    for (int32_t i = 0; i < v.count; ++i) out.push_back(Arg<T>::read(v.items[i]));
    return out;
  }
};

struct Results {  // filled by write(); items live until the caller has read them
  musa_value value{};
  std::vector<musa_value> items;
};
inline void write_one(musa_value& out, const at::Tensor& t) {
  out.tag = t.defined() ? MUSA_TENSOR : MUSA_NONE;
  out.tensor = t.musa_handle();
  if (out.tensor) ::musa_retain(out.tensor);
}
inline void write_one(musa_value& out, bool v) { out.tag = MUSA_BOOL; out.i = v; }
template <class T> std::enable_if_t<std::is_integral_v<T> && !std::is_same_v<T, bool>> write_one(musa_value& out, T v) { out.tag = MUSA_INT; out.i = static_cast<int64_t>(v); }
template <class T> std::enable_if_t<std::is_floating_point_v<T>> write_one(musa_value& out, T v) { out.tag = MUSA_DOUBLE; out.d = v; }
template <class T> void write(Results& r, const T& v) { write_one(r.value, v); }
template <class T> void write(Results& r, const std::vector<T>& v) {
  r.items.resize(v.size());
  for (size_t i = 0; i < v.size(); ++i) write_one(r.items[i], v[i]);
  r.value.tag = MUSA_LIST;
}
template <class... T> void write(Results& r, const std::tuple<T...>& v) {
  r.items.resize(sizeof...(T));
  size_t i = 0;
  std::apply([&](const auto&... x) { ((write_one(r.items[i++], x)), ...); }, v);
  r.value.tag = MUSA_TUPLE;
}

template <class R, class... A, size_t... I>
void invoke(R (*fn)(A...), const musa_value* args, Results& r, std::index_sequence<I...>) {
  if constexpr (std::is_void_v<R>) {
    fn(Arg<std::remove_cv_t<std::remove_reference_t<A>>>::read(args[I])...);
    r.value.tag = MUSA_NONE;
  } else {
    write(r, fn(Arg<std::remove_cv_t<std::remove_reference_t<A>>>::read(args[I])...));
  }
}
// Lvalue references other than const cannot bind to converted arguments; torch's own binder takes `Tensor&`, so
// such signatures are left to it.
template <class T> constexpr bool convertible_v = !std::is_lvalue_reference_v<T> || std::is_const_v<std::remove_reference_t<T>>;

template <class R, class... A>
int32_t call(R (*fn)(A...), const musa_value* args, int32_t count, musa_value* out) {
  static_assert((convertible_v<A> && ...), "left to the full header");
  static thread_local Results r;
  r.items.clear();
  if (count != static_cast<int32_t>(sizeof...(A))) { ::musa_set_error("incompatible function arguments", 1); return -1; }
  try {
    invoke(fn, args, r, std::index_sequence_for<A...>{});
    r.value.count = static_cast<int32_t>(r.items.size());
    if (r.value.tag == MUSA_LIST || r.value.tag == MUSA_TUPLE) r.value.items = r.items.data();
    *out = r.value;
    return 0;
  } catch (const TypeMismatch&) { ::musa_set_error("incompatible function arguments", 1);
  } catch (const std::bad_alloc& e) { ::musa_set_error(e.what(), 4);
  } catch (const std::out_of_range& e) { ::musa_set_error(e.what(), 3);
  } catch (const std::invalid_argument& e) { ::musa_set_error(e.what(), 2);
  } catch (const std::exception& e) { ::musa_set_error(e.what(), 0);
  } catch (...) { ::musa_set_error("unknown C++ exception", 0); }
  return -1;
}
}  // namespace musa_light
