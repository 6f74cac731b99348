#ifndef OCTOPAGE_STEP_OUTPUT_FILE_HPP_
#define OCTOPAGE_STEP_OUTPUT_FILE_HPP_

#include <cstdint>
#include <filesystem>

namespace octopage {

/// A file that is written whole or not at all: a new one beside the target, which `commit` flushes
/// to disk and renames. Unless committed it is gone at the end of the scope. Throws Error(bad_file)
/// with the target's name and the reason for everything that fails, and where the target exists and
/// is not a regular file.
class OutputFile {
 public:
  explicit OutputFile(const std::filesystem::path& target);
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  void write(const void* data, uint64_t bytes);
  void commit();

 private:
  std::filesystem::path target_;
  std::filesystem::path path_;
  int descriptor_ = -1;
  bool committed_ = false;
};

}  // namespace octopage

#endif  // OCTOPAGE_STEP_OUTPUT_FILE_HPP_
