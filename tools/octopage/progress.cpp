#include "tools/octopage/progress.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <utility>

namespace octopage::cli {

Progress::Progress(std::string what) : what_(std::move(what)) {
  if (isatty(STDERR_FILENO) != 0) thread_ = std::thread([this] { show(); });
}

Progress::~Progress() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  stop_.notify_one();
  thread_.join();
}

void Progress::show() {
  constexpr const char* kFrames[] = {"[=    ]", "[ =   ]", "[  =  ]", "[   = ]",
                                     "[    =]", "[   = ]", "[  =  ]", "[ =   ]"};
  const auto start = std::chrono::steady_clock::now();
  std::unique_lock lock(mutex_);
  auto next = start + std::chrono::seconds(1);
  bool shown = false;
  for (size_t frame = 0; !stop_.wait_until(lock, next, [this] { return stopped_; }); ++frame) {
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    fmt::print(stderr, "\r{} {} {:.1f} s", kFrames[frame % 8], what_, seconds);
    std::fflush(stderr);
    shown = true;
    next += std::chrono::milliseconds(125);
  }
  if (shown) {
    fmt::print(stderr, "\r\x1b[K");
    std::fflush(stderr);
  }
}

}  // namespace octopage::cli
