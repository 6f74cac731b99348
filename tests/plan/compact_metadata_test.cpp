#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "octopage/error.hpp"
#include "octopage/page_arithmetic.hpp"
#include "octopage/page_plan.hpp"
#include "plan/compact_metadata.hpp"

namespace octopage {
namespace {

TEST(CompactMetadata, AgreesWithTheContractsFormula) {
  EXPECT_TRUE(rc::check("indptr and last_page_len", [](const std::vector<int16_t>& raw) {
    const std::vector<int64_t> positions(raw.begin(), raw.end());
    const int64_t region_count = *rc::gen::inRange<int64_t>(0, 700);
    const auto metadata = compact_page_metadata(positions, region_count);
    int64_t total = 0;
    RC_ASSERT(metadata.indptr.size() == positions.size() + 1);
    RC_ASSERT(metadata.indptr[0] == 0);
    for (size_t row = 0; row < positions.size(); ++row) {
      const int64_t p = positions[row];
      if (p >= 0) total += std::min(p / 8 + 1, region_count);
      RC_ASSERT(metadata.indptr[row + 1] == total);
      RC_ASSERT(metadata.last_page_len[row] == ((p % 8) + 8) % 8 + 1);
    }
  }));
}

TEST(CompactMetadata, NegativePositions) {
  const std::vector<int64_t> positions = {-1, -2, -8, -9, 0};
  const auto metadata = compact_page_metadata(positions, 4);
  EXPECT_EQ(metadata.indptr, (std::vector<int32_t>{0, 0, 0, 0, 0, 1}));
  EXPECT_EQ(metadata.last_page_len, (std::vector<int32_t>{8, 7, 1, 8, 1}));
}

TEST(CompactMetadata, LimitsAreErrors) {
  const std::vector<int64_t> far(3, int64_t{1} << 33);
  EXPECT_NO_THROW(compact_entry_count(far, 715827882));  // 3 * 715827882 = 2^31 - 2
  try {
    compact_page_metadata(far, 715827883);  // 2^31 + 1
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("2147483649"), std::string::npos) << error.what();
  }
  EXPECT_THROW(compact_page_metadata(far, -1), Error);
  // A region is an i32.
  const std::vector<int64_t> limit = {3, (int64_t{1} << 34) - 1, int64_t{1} << 34};
  EXPECT_NO_THROW(compact_entry_count(std::span(limit).first(2), 4));
  try {
    compact_page_metadata(limit, 4);
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("positions[2] = 17179869184"), std::string::npos)
        << error.what();
  }
  const std::vector<int64_t> last(100, std::numeric_limits<int64_t>::max());
  EXPECT_THROW(compact_page_metadata(last, std::numeric_limits<int64_t>::max()), Error);
}

TEST(CompactMetadata, FixupKeepsAtMostThePlannedRange) {
  EXPECT_TRUE(rc::check("fixup", [](const std::vector<uint8_t>& raw) {
    std::vector<int64_t> bounds, exact;
    bool cut = false;
    const int64_t region_count = *rc::gen::inRange<int64_t>(1, 40);
    for (const uint8_t value : raw) {
      exact.push_back(value - 3);
      bounds.push_back(exact.back() + *rc::gen::inRange<int64_t>(-20, 60));
    }
    const auto planned = compact_page_metadata(bounds, region_count);
    std::vector<int32_t> indptr(raw.size() + 1, -9), last(raw.size(), -9);
    const int32_t status = fixup_compact_metadata(exact, region_count, planned.indptr.data(),
                                                  indptr.data(), last.data());
    int64_t total = 0;
    for (size_t row = 0; row < raw.size(); ++row) {
      const int64_t want = exact[row] < 0 ? 0 : std::min(exact[row] / 8 + 1, region_count);
      const int64_t room = planned.indptr[row + 1] - planned.indptr[row];
      cut |= want > room;
      total += std::min(want, room);
      RC_ASSERT(indptr[row + 1] == total);
      RC_ASSERT(last[row] == ((exact[row] % 8) + 8) % 8 + 1);
    }
    RC_ASSERT(status == (cut ? status_range_cut : 0));
  }));
}

}  // namespace
}  // namespace octopage
