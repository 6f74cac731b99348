#ifndef OCTOPAGE_TOOLS_OUTPUT_HPP_
#define OCTOPAGE_TOOLS_OUTPUT_HPP_

// What the command line writes: standard output, standard error, and the names of its files.

#include <fmt/format.h>

#include <string>
#include <string_view>
#include <utility>

namespace octopage::cli {

/// To be called first. A reader that goes away and a file-size limit become errors of the write
/// instead of ending the process with its temporary files left behind; and a closed standard stream
/// stays closed instead of becoming the first file that is opened.
void prepare_streams();

/// Writes to stdout. Throws Error(bad_file) where it cannot be written.
void write_out(std::string_view text);
/// Hands what was written to the system. Throws Error(bad_file) where that fails.
void flush_out();
/// Writes to stderr; what cannot be written there is lost.
void write_err(std::string_view text);

template <typename... Args>
void print_out(fmt::format_string<Args...> format, Args&&... args) {
  write_out(fmt::format(format, std::forward<Args>(args)...));
}

template <typename... Args>
void print_err(fmt::format_string<Args...> format, Args&&... args) {
  write_err(fmt::format(format, std::forward<Args>(args)...));
}

/// Refuses a file name that was given and is empty: Error(invalid_argument) that names the flag.
void require_file_name(std::string_view flag, const std::string& name);

}  // namespace octopage::cli

#endif  // OCTOPAGE_TOOLS_OUTPUT_HPP_
