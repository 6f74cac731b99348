#include <gtest/gtest.h>

#include <cstdio>
#include <cstring>
#include <string>

#include "octopage/octopage.hpp"

namespace octopage::test {
std::string cases_directory;
}

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i + 1 < argc; ++i) {
    if (std::strcmp(argv[i], "--cases") == 0) octopage::test::cases_directory = argv[i + 1];
  }
  for (const auto& backend : octopage::backends()) {
    if (backend.name != "cuda-sm80" || backend.available) continue;
    std::printf("skipped: %s\n", backend.reason.c_str());
    return 77;
  }
  return RUN_ALL_TESTS();
}
