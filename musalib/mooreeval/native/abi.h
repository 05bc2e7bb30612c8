// C boundary between a candidate compiled against the light header and the real libtorch behind shim.cpp.
// Plain C types only: no std:: type crosses it, so either side may be built with its own flags.
#pragma once
#include <cstdint>

#define MUSA_API extern "C" __attribute__((visibility("default")))

struct musa_tensor;  // an owned at::TensorImpl

enum musa_tag : int32_t { MUSA_NONE, MUSA_TENSOR, MUSA_INT, MUSA_DOUBLE, MUSA_BOOL, MUSA_STRING, MUSA_LIST, MUSA_TUPLE };

struct musa_value {
  int32_t tag;
  int32_t count;  // elements of a list or tuple
  union {
    int64_t i;
    double d;
    musa_tensor* tensor;
    const char* text;
    musa_value* items;
  };
};

// Every function below that can fail returns null / -1 and leaves the reason in musa_last_error().
MUSA_API const char* musa_last_error();
MUSA_API void musa_set_error(const char* text, int32_t kind);  // kind 0 RuntimeError, 1 TypeError, 2 ValueError, 3 IndexError, 4 MemoryError
MUSA_API void musa_retain(musa_tensor*);
MUSA_API void musa_release(musa_tensor*);
MUSA_API int64_t musa_dim(const musa_tensor*);
MUSA_API int64_t musa_numel(const musa_tensor*);
MUSA_API const int64_t* musa_sizes(const musa_tensor*);
MUSA_API const int64_t* musa_strides(const musa_tensor*);
MUSA_API int32_t musa_dtype(const musa_tensor*);
MUSA_API int32_t musa_is_cpu(const musa_tensor*);
MUSA_API int32_t musa_is_contiguous(const musa_tensor*);
MUSA_API void* musa_data(const musa_tensor*);
MUSA_API musa_tensor* musa_contiguous(const musa_tensor*);
MUSA_API musa_tensor* musa_clone(const musa_tensor*);
MUSA_API musa_tensor* musa_new(const int64_t* sizes, int64_t dim, int32_t dtype, int32_t fill);  // fill: -1 none, 0 zeros, 1 ones
MUSA_API musa_tensor* musa_new_like(const musa_tensor*, int32_t fill);
MUSA_API musa_tensor* musa_view(const musa_tensor*, const int64_t* sizes, int64_t dim);
MUSA_API musa_tensor* musa_transpose(const musa_tensor*, int64_t, int64_t);
