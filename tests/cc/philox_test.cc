#include "cc/table/philox.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <vector>

namespace dynemb {
namespace {

struct KnownAnswer {
  Philox4 counter;
  uint32_t key[2];
  Philox4 words;
};

// kat_vectors of Random123 1.14, the lines "philox4x32 10".
constexpr KnownAnswer kKnownAnswers[] = {
    {{{0, 0, 0, 0}}, {0, 0}, {{0x6627E8D5u, 0xE169C58Du, 0xBC57AC4Cu, 0x9B00DBD8u}}},
    {{{0xFFFFFFFFu, 0xFFFFFFFFu, 0xFFFFFFFFu, 0xFFFFFFFFu}},
     {0xFFFFFFFFu, 0xFFFFFFFFu},
     {{0x408F276Du, 0x41C83B0Eu, 0xA20BC7C6u, 0x6D5451FDu}}},
    {{{0x243F6A88u, 0x85A308D3u, 0x13198A2Eu, 0x03707344u}},
     {0xA4093822u, 0x299F31D0u},
     {{0xD16CFE09u, 0x94FDCCEBu, 0x5001E420u, 0x24126EA1u}}},
};

TEST(PhiloxTest, KnownAnswers) {
  for (const KnownAnswer& k : kKnownAnswers) {
    const Philox4 words = Philox(k.counter, k.key[0], k.key[1]);
    for (int w = 0; w < 4; ++w) EXPECT_EQ(words.word[w], k.words.word[w]);
  }
}

TEST(PhiloxTest, BlockSetsCounterAndKey) {
  const Philox4 a = PhiloxBlock(0x299F31D0A4093822u, 0x85A308D3243F6A88u,
                                static_cast<PhiloxStream>(0x03707344u), 0x13198A2Eu);
  for (int w = 0; w < 4; ++w) EXPECT_EQ(a.word[w], kKnownAnswers[2].words.word[w]);
}

TEST(PhiloxTest, WordsEqualTheBlocks) {
  for (const int64_t first : {int64_t{0}, int64_t{4}, int64_t{64}, int64_t{4} * 0xFFFFFFFE}) {
    for (int64_t columns = 0; columns <= 70; ++columns) {
      std::vector<uint32_t> words(static_cast<size_t>(PhiloxPadded(columns)), 0);
      const uint64_t seed = 0xFEDCBA9876543210u + static_cast<uint64_t>(columns);
      const uint64_t id = 0xFFFFFFFF00000001u;
      PhiloxWords(PhiloxSchedule(seed), id, PhiloxStream::kRounding, first, columns, words.data());
      for (int64_t c = 0; c < columns; ++c) {
        const auto block = static_cast<uint32_t>((first + c) / 4);  // wraps: columns end at 2^34
        const Philox4 expected = PhiloxBlock(seed, id, PhiloxStream::kRounding, block);
        ASSERT_EQ(words[static_cast<size_t>(c)], expected.word[c % 4]) << first << " " << c;
      }
    }
  }
}

TEST(PhiloxTest, PaddingIsNeverExceeded) {
  for (int64_t columns = 1; columns <= 70; ++columns) {
    std::vector<uint32_t> words(static_cast<size_t>(PhiloxPadded(columns)) + 1, 42);
    PhiloxWords(PhiloxSchedule(1), 2, PhiloxStream::kInitialVector, 0, columns, words.data());
    EXPECT_EQ(words.back(), 42u);
  }
}

TEST(UnitTest, EndsOfTheIntervals) {
  EXPECT_EQ(UnitClosedOpen(0), 0.0f);
  EXPECT_EQ(UnitClosedOpen(0xFFFFFFFFu), 1.0f - 0x1p-24f);
  EXPECT_EQ(UnitOpen(0), 0x1p-24f);
  EXPECT_EQ(UnitOpen(0xFFFFFFFFu), 1.0f - 0x1p-24f);
}

TEST(UnitTest, EveryValueIsEquallyLikely) {
  double closed = 0, open = 0;
  float before = -1.0f;
  for (uint32_t high = 0; high < (1u << 24); ++high) {
    const float unit = UnitClosedOpen(high << 8 | 0xFFu);
    ASSERT_EQ(unit, UnitClosedOpen(high << 8));
    ASSERT_GT(unit, before);
    before = unit;
    closed += unit;
    open += UnitOpen(high << 8);
    ASSERT_EQ(UnitOpen(high << 8), 1.0f - UnitOpen(~(high << 8)));
  }
  EXPECT_EQ(closed / (1 << 24), 0.5 - 0x1p-25);
  EXPECT_EQ(open / (1 << 24), 0.5);
}

}  // namespace
}  // namespace dynemb
