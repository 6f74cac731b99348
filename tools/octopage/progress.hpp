#ifndef OCTOPAGE_TOOLS_PROGRESS_HPP_
#define OCTOPAGE_TOOLS_PROGRESS_HPP_

#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

namespace octopage::cli {

/// For its lifetime, shows on stderr what is being done and for how long: after the first second,
/// and only where stderr is a terminal. The line is wiped at the end.
class Progress {
 public:
  explicit Progress(std::string what);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

 private:
  void show();

  std::string what_;
  std::mutex mutex_;
  std::condition_variable stop_;
  bool stopped_ = false;
  std::thread thread_;
};

}  // namespace octopage::cli

#endif  // OCTOPAGE_TOOLS_PROGRESS_HPP_
