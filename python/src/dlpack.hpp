#ifndef OCTOPAGE_PYTHON_DLPACK_HPP_
#define OCTOPAGE_PYTHON_DLPACK_HPP_

// Takes over a DLPack capsule, of the unversioned protocol or of version 1. Read here rather than
// by nanobind because the read-only flag and the reason of a refusal matter.
//
// The structs are DLPack's ABI (dlpack.h, version 1.1), which does not change within a version 1.

#include <Python.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>

#include "octopage/error.hpp"
#include "octopage/tensor.hpp"

namespace octopage::dlpack {

struct Tensor {
  void* data;
  int32_t device_type;
  int32_t device_id;
  int32_t ndim;
  uint8_t type_code;
  uint8_t type_bits;
  uint16_t type_lanes;
  int64_t* shape;
  int64_t* strides;  // in elements; null: row-major
  uint64_t byte_offset;
};

struct Managed {  // a capsule named "dltensor"
  Tensor tensor;
  void* context;
  void (*deleter)(Managed*);
};

struct ManagedVersioned {  // a capsule named "dltensor_versioned"
  uint32_t major;
  uint32_t minor;
  void* context;
  void (*deleter)(ManagedVersioned*);
  uint64_t flags;
  Tensor tensor;
};
inline constexpr uint64_t kReadOnly = 1;

/// A tensor of another framework, and what keeps its memory alive.
struct Imported {
  std::shared_ptr<void> owner;
  TensorView view;  ///< a tensor without dimensions is seen as [1]
  int32_t rank = 0;
  bool read_only = false;
};

[[noreturn]] inline void refuse(const std::string& message) {
  throw Error(ErrorCode::invalid_argument, message);
}

inline DType dtype_of(const Tensor& tensor) {
  struct Known {
    uint8_t code, bits;
    DType dtype;
  };
  constexpr Known kKnown[] = {{4, 16, DType::bf16},     {2, 16, DType::f16}, {2, 32, DType::f32},
                              {1, 8, DType::u8},        {0, 32, DType::i32}, {0, 64, DType::i64},
                              {10, 8, DType::f8_e4m3fn}};
  for (const Known& known : kKnown) {
    if (tensor.type_code == known.code && tensor.type_bits == known.bits && tensor.type_lanes == 1)
      return known.dtype;
  }
  refuse("dtype must be bf16, f16, f32, f8_e4m3fn, u8, i32 or i64, is DLPack's code " +
         std::to_string(tensor.type_code) + " with " + std::to_string(tensor.type_bits) + " bits");
}

inline Device device_of(const Tensor& tensor) {
  switch (tensor.device_type) {
    case 1:  // host memory, pinned by CUDA or not
    case 3:
      return {};
    case 2:  // device memory, managed or not
    case 13:
      return {DeviceType::cuda, tensor.device_id};
    default:
      refuse("must lie on the CPU or on a CUDA device, lies on DLPack's device type " +
             std::to_string(tensor.device_type));
  }
}

inline void describe(const Tensor& tensor, Imported* imported) {
  if (tensor.ndim < 0 || tensor.ndim > kMaxRank) {
    refuse("must have at most " + std::to_string(kMaxRank) + " dimensions, has " +
           std::to_string(tensor.ndim));
  }
  imported->rank = tensor.ndim;
  TensorView& view = imported->view;
  view.data =
      tensor.data == nullptr ? nullptr : static_cast<char*>(tensor.data) + tensor.byte_offset;
  view.dtype = dtype_of(tensor);
  view.device = device_of(tensor);
  view.rank = tensor.ndim == 0 ? 1 : tensor.ndim;
  view.shape[0] = view.strides[0] = 1;
  for (int32_t i = 0; i < tensor.ndim; ++i) view.shape[static_cast<size_t>(i)] = tensor.shape[i];
  // Frameworks say anything about the strides of nothing.
  const bool natural_strides = tensor.strides == nullptr || view.size() == 0;
  int64_t natural = 1;
  for (int32_t i = tensor.ndim; i-- > 0;) {
    const auto d = static_cast<size_t>(i);
    view.strides[d] = natural_strides ? natural : tensor.strides[i];
    natural *= view.shape[d] > 0 ? view.shape[d] : 1;
  }
}

/// The capsule's content becomes the import's; the capsule is marked as used.
template <typename Content>
Imported take(PyObject* capsule, const char* name, const char* used, bool read_only) {
  auto* content = static_cast<Content*>(PyCapsule_GetPointer(capsule, name));
  Imported imported;
  describe(content->tensor, &imported);
  imported.read_only = read_only;
  PyCapsule_SetName(capsule, used);
  imported.owner = std::shared_ptr<void>(content, [](void* held) {
    auto* owned = static_cast<Content*>(held);
    if (owned->deleter != nullptr) owned->deleter(owned);
  });
  return imported;
}

inline Imported import(PyObject* capsule) {
  if (!PyCapsule_CheckExact(capsule)) {
    refuse(std::string("__dlpack__ must return a capsule, returned ") + Py_TYPE(capsule)->tp_name);
  }
  const char* found = PyCapsule_GetName(capsule);
  const std::string name = found == nullptr ? "" : found;
  if (name == "dltensor") return take<Managed>(capsule, "dltensor", "used_dltensor", false);
  if (name == "dltensor_versioned") {
    const auto* content =
        static_cast<const ManagedVersioned*>(PyCapsule_GetPointer(capsule, "dltensor_versioned"));
    if (content->major != 1) {
      refuse("DLPack's version must be 1, is " + std::to_string(content->major));
    }
    return take<ManagedVersioned>(capsule, "dltensor_versioned", "used_dltensor_versioned",
                                  (content->flags & kReadOnly) != 0);
  }
  if (name.rfind("used_", 0) == 0) {
    refuse("its DLPack capsule has been used before; __dlpack__ must return a new one each time");
  }
  refuse("__dlpack__ returned a capsule named '" + name + "', which is no tensor");
}

}  // namespace octopage::dlpack

#endif  // OCTOPAGE_PYTHON_DLPACK_HPP_
