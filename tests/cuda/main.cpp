// octopage_cuda_tests --cases DIR [--backend NAME]: all tests on one backend, cuda-sm80 by default.

#include <gtest/gtest.h>

#include <cstdio>
#include <cstring>
#include <string>

#include "octopage/octopage.hpp"

namespace octopage::test {
std::string cases_directory;
std::string test_backend = "cuda-sm80";
int64_t calls_under_test = 0;
}  // namespace octopage::test

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i + 1 < argc; ++i) {
    if (std::strcmp(argv[i], "--cases") == 0) octopage::test::cases_directory = argv[i + 1];
    if (std::strcmp(argv[i], "--backend") == 0) octopage::test::test_backend = argv[i + 1];
  }
  for (const auto& backend : octopage::backends()) {
    if (backend.name != octopage::test::test_backend || backend.available) continue;
    std::printf("skipped: %s\n", backend.reason.c_str());
    return 77;
  }
  const int result = RUN_ALL_TESTS();
  std::printf("%lld calls on %s\n", static_cast<long long>(octopage::test::calls_under_test),
              octopage::test::test_backend.c_str());
  return result;
}
