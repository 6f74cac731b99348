#ifndef OCTOPAGE_OPTIONS_HPP_
#define OCTOPAGE_OPTIONS_HPP_

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "octopage/export.h"

namespace octopage {

/// Runs the library's parallel loops on threads of the caller's choosing (CPU backends).
class OCTOPAGE_API Executor {
 public:
  virtual ~Executor() = default;

  /// How many calls of `body` may run at the same time; at least 1 and constant.
  virtual int32_t concurrency() const = 0;

  /// Calls `body(context, index, worker)` once for every index in `[0, count)`, in any order, and
  /// returns when all have returned. `worker` is in `[0, concurrency())` and no two calls that run
  /// at the same time share it. `body` does not throw.
  virtual void parallel_for(int64_t count,
                            void (*body)(void* context, int64_t index, int32_t worker),
                            void* context) = 0;
};

/// How to run a call; what it computes does not depend on it beyond the stated accuracy.
struct Options {
  /// Backend by name; empty: the environment variable OCTOPAGE_BACKEND, or else by priority.
  /// A named backend that cannot serve the call is an error, never replaced by another.
  std::string_view backend = {};
  /// Fail before any output is written at the first invalid region, owner or table entry (the
  /// message names row, entry and value), also at duplicate regions, instead of skipping it.
  bool strict = false;
  /// A row's bits do not depend on the other rows of the call: tiles of one row.
  bool batch_invariant = false;
  /// [1] i32 on the tensors' device; may be null. Invalid entries OR their StatusBit into it.
  int32_t* status = nullptr;
  /// CPU threads; 0: all that the process may use. Ignored where `executor` is given.
  int32_t threads = 0;
  /// CPU: runs the loops instead of the built-in threads; may be null.
  Executor* executor = nullptr;
  /// CUDA: the stream, a cudaStream_t; null is the default stream. Ignored on the CPU.
  void* stream = nullptr;
  /// Scratch memory on the tensors' device, any alignment; nothing lives in it between calls. On
  /// the CPU null lets the call allocate what it needs. On CUDA nothing is allocated: null leaves
  /// the call to backends that need none, which are slower on Hopper. Too small is an error that
  /// says how much.
  void* workspace = nullptr;
  size_t workspace_bytes = 0;
};

/// An f8 cache's scale: the stored value times the scale is the real value. It is finite (a value
/// on a device is not checked). Caches of other types have none, and theirs is not read.
struct Scale {
  enum class Kind : int32_t { absent = 0, value = 1, pointer = 2 };
  Kind kind = Kind::absent;
  float value = 1.0f;
  const float* pointer = nullptr;  ///< [1] on the cache's device, read when the call runs

  static Scale of(float value) { return {Kind::value, value, nullptr}; }
  static Scale at(const float* pointer) { return {Kind::pointer, 1.0f, pointer}; }
};

}  // namespace octopage

#endif  // OCTOPAGE_OPTIONS_HPP_
