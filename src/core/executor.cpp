#include "core/executor.hpp"

#include <oneapi/tbb/blocked_range.h>
#include <oneapi/tbb/info.h>
#include <oneapi/tbb/parallel_for.h>
#include <oneapi/tbb/task_arena.h>

#include <atomic>
#include <exception>
#include <thread>
#include <vector>

#include "core/check.hpp"

namespace octopage {
namespace {

class SerialExecutor final : public Executor {
 public:
  int32_t concurrency() const override { return 1; }
  void parallel_for(int64_t count, void (*body)(void*, int64_t, int32_t), void* context) override {
    for (int64_t i = 0; i < count; ++i) body(context, i, 0);
  }
};

#if defined(__SANITIZE_THREAD__)

// A system's oneTBB is not instrumented: ThreadSanitizer would report each hand-over of work.
class BuiltInExecutor final : public Executor {
 public:
  explicit BuiltInExecutor(int32_t threads) : threads_(threads) {}
  int32_t concurrency() const override { return threads_; }
  void parallel_for(int64_t count, void (*body)(void*, int64_t, int32_t), void* context) override {
    std::atomic<int64_t> next{0};
    std::vector<std::jthread> workers;
    for (int32_t worker = 0; worker < threads_; ++worker) {
      workers.emplace_back([&, worker] {
        for (int64_t i = next++; i < count; i = next++) body(context, i, worker);
      });
    }
  }

 private:
  int32_t threads_;
};

#else

class BuiltInExecutor final : public Executor {
 public:
  explicit BuiltInExecutor(int32_t threads) : threads_(threads), arena_(threads) {}
  int32_t concurrency() const override { return threads_; }
  void parallel_for(int64_t count, void (*body)(void*, int64_t, int32_t), void* context) override {
    arena_.execute([&] {
      oneapi::tbb::parallel_for(
          oneapi::tbb::blocked_range<int64_t>(0, count, 1),
          [&](const oneapi::tbb::blocked_range<int64_t>& range) {
            const int32_t worker = oneapi::tbb::this_task_arena::current_thread_index();
            for (int64_t i = range.begin(); i != range.end(); ++i) body(context, i, worker);
          },
          oneapi::tbb::simple_partitioner());
    });
  }

 private:
  int32_t threads_;
  oneapi::tbb::task_arena arena_;
};

#endif

}  // namespace

Threads::Threads(Executor* executor, int32_t threads) : executor_(executor) {
  if (threads < 0) fail_argument("options.threads = {}: must not be negative", threads);
  if (executor_ == nullptr) {
    const int32_t count = threads > 0 ? threads : oneapi::tbb::info::default_concurrency();
    if (count == 1) {
      own_ = std::make_unique<SerialExecutor>();
    } else {
      own_ = std::make_unique<BuiltInExecutor>(count);
    }
    executor_ = own_.get();
  }
  concurrency_ = executor_->concurrency();
  if (concurrency_ < 1) {
    fail_argument("options.executor: concurrency() = {}: must be at least 1", concurrency_);
  }
}

Threads::~Threads() = default;

void Threads::run(int64_t count, void (*body)(void*, int64_t, int32_t), void* context) {
  if (count <= 0) return;
  // The caller's executor must not see exceptions: the first one waits here.
  struct Guarded {
    void (*body)(void*, int64_t, int32_t);
    void* context;
    std::atomic_flag failed = ATOMIC_FLAG_INIT;
    std::exception_ptr error = nullptr;
  } guarded{body, context};
  executor_->parallel_for(
      count,
      [](void* data, int64_t index, int32_t worker) {
        auto& g = *static_cast<Guarded*>(data);
        try {
          g.body(g.context, index, worker);
        } catch (...) {
          if (!g.failed.test_and_set()) g.error = std::current_exception();
        }
      },
      &guarded);
  if (guarded.error) std::rethrow_exception(guarded.error);
}

}  // namespace octopage
