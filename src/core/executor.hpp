#ifndef OCTOPAGE_CORE_EXECUTOR_HPP_
#define OCTOPAGE_CORE_EXECUTOR_HPP_

#include <cstdint>
#include <memory>
#include <type_traits>

#include "octopage/options.hpp"

namespace octopage {

/// Threads of a CPU call: the caller's executor, or oneTBB limited to `threads` (0: all that the
/// process may use). Made per call; holds no global state.
class Threads {
 public:
  Threads(Executor* executor, int32_t threads);
  explicit Threads(const Options& options) : Threads(options.executor, options.threads) {}
  ~Threads();
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

  /// Workers that run at the same time; checked to be positive.
  int32_t concurrency() const { return concurrency_; }

  /// `body(index, worker)` for every index in [0, count). An exception of `body` is rethrown here
  /// after all workers have stopped; which one, if there are several, is not defined.
  template <typename Body>
  void parallel_for(int64_t count, Body&& body) {
    using Type = std::remove_reference_t<Body>;
    run(
        count,
        [](void* context, int64_t index, int32_t worker) {
          (*static_cast<Type*>(context))(index, worker);
        },
        const_cast<void*>(static_cast<const void*>(&body)));
  }

 private:
  void run(int64_t count, void (*body)(void*, int64_t, int32_t), void* context);

  Executor* executor_ = nullptr;   // the caller's, may be null
  std::unique_ptr<Executor> own_;  // null where executor_ is the caller's
  int32_t concurrency_ = 1;
};

}  // namespace octopage

#endif  // OCTOPAGE_CORE_EXECUTOR_HPP_
