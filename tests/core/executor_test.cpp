#include "core/executor.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <vector>

#include "octopage/error.hpp"

namespace octopage {
namespace {

TEST(Threads, EachIndexOnceAndWorkersApart) {
  for (const int32_t threads : {1, 2, 5}) {
    Threads pool(nullptr, threads);
    EXPECT_EQ(pool.concurrency(), threads);
    std::vector<std::atomic<int>> seen(1000);
    std::vector<std::atomic<int>> running(static_cast<size_t>(threads));
    std::atomic<bool> shared{false}, outside{false};
    pool.parallel_for(1000, [&](int64_t index, int32_t worker) {
      if (worker < 0 || worker >= threads) {
        outside = true;
        return;
      }
      if (running[static_cast<size_t>(worker)].fetch_add(1) != 0) shared = true;
      seen[static_cast<size_t>(index)].fetch_add(1);
      running[static_cast<size_t>(worker)].fetch_sub(1);
    });
    EXPECT_FALSE(shared) << "two calls that ran at the same time had one worker";
    EXPECT_FALSE(outside);
    for (const auto& count : seen) ASSERT_EQ(count.load(), 1);
  }
}

TEST(Threads, NothingToDo) {
  Threads pool(nullptr, 2);
  pool.parallel_for(0, [](int64_t, int32_t) { FAIL(); });
}

TEST(Threads, ExceptionsArriveAfterAllHaveStopped) {
  Threads pool(nullptr, 2);
  std::atomic<int> calls{0};
  EXPECT_THROW(pool.parallel_for(50,
                                 [&](int64_t index, int32_t) {
                                   calls.fetch_add(1);
                                   if (index == 7) throw std::runtime_error("seven");
                                 }),
               std::runtime_error);
  EXPECT_EQ(calls.load(), 50);
}

class Recording final : public Executor {
 public:
  explicit Recording(int32_t concurrency) : concurrency_(concurrency) {}
  int32_t concurrency() const override { return concurrency_; }
  void parallel_for(int64_t count, void (*body)(void*, int64_t, int32_t), void* context) override {
    ++loops;
    for (int64_t i = count; i-- > 0;) body(context, i, static_cast<int32_t>(i % concurrency_));
  }
  int loops = 0;

 private:
  int32_t concurrency_;
};

TEST(Threads, UsesTheCallersExecutor) {
  Recording executor(3);
  Threads pool(&executor, 0);
  EXPECT_EQ(pool.concurrency(), 3);
  int64_t sum = 0;
  pool.parallel_for(10, [&](int64_t index, int32_t) { sum += index; });
  EXPECT_EQ(sum, 45);
  EXPECT_EQ(executor.loops, 1);
  EXPECT_THROW(pool.parallel_for(3, [](int64_t, int32_t) { throw std::logic_error("x"); }),
               std::logic_error);
}

TEST(Threads, BadCountsAreRefused) {
  EXPECT_THROW(Threads(nullptr, -1), Error);
  Recording none(0);
  EXPECT_THROW(Threads(&none, 0), Error);
}

}  // namespace
}  // namespace octopage
