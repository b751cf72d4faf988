// The fixture of the tests of Pack, Unpack and the addresses of received rows, typed by Places.
#ifndef DYNEMB_TESTS_CC_WIRE_FIXTURE_H_
#define DYNEMB_TESTS_CC_WIRE_FIXTURE_H_

#include <gtest/gtest.h>

#include <cstring>
#include <utility>
#include <vector>

#include "cc/device/wire.h"
#include "cc/lookup/wire.h"
#include "tests/cc/places.h"
#include "tests/cc/wire_model.h"

namespace dynemb {

inline Status PackAt(HostPlace& at, const WireLayout& layout, const std::vector<const void*>& rows,
                     int32_t* words) {
  Pack(at.exec(), layout, rows, words);
  return Status();
}
template <class Device>
Status PackAt(DevicePlace<Device>& at, const WireLayout& layout,
              const std::vector<const void*>& rows, int32_t* words) {
  return at.Call([&](auto& session) { return device::Pack(session, layout, rows, words); });
}

inline Status UnpackAt(HostPlace& at, const WireLayout& layout, const int32_t* words,
                       const std::vector<const void*>& own, const std::vector<void*>& rows) {
  Unpack(at.exec(), layout, words, own, rows);
  return Status();
}
template <class Device>
Status UnpackAt(DevicePlace<Device>& at, const WireLayout& layout, const int32_t* words,
                const std::vector<const void*>& own, const std::vector<void*>& rows) {
  return at.Call([&](auto& session) { return device::Unpack(session, layout, words, own, rows); });
}

// Calls check(the addresses of the received rows of each table).
template <class Check>
Status FindRowsAt(HostPlace& at, const WireLayout& layout, const int32_t* words,
                  const std::vector<const void*>& own, const Check& check) {
  WireRows found;
  found.Init(at.exec(), layout, words, own);
  std::vector<const void* const*> rows;
  for (size_t t = 0; t < layout.tables().size(); ++t) rows.push_back(found.of(t));
  check(rows);
  return Status();
}
template <class Device, class Check>
Status FindRowsAt(DevicePlace<Device>& at, const WireLayout& layout, const int32_t* words,
                  const std::vector<const void*>& own, const Check& check) {
  return at.Call([&](auto& session) {
    std::vector<const void* const*> rows(7, own.data());  // garbage
    const Status status = device::ReceivedRows(session, layout, words, own, &rows);
    if (status.ok()) check(rows);
    return status;
  });
}

template <class Place>
class WireFixture : public testing::Test {
 protected:
  static constexpr bool kSlow = Place::kSlow;

  // Checks all three functions. The tables in `left_out` are not packed; their words in the message
  // stay unchanged. `sent` may be null.
  void Check(const Rows& rows, size_t shift = 0, const std::vector<size_t>& left_out = {},
             Sent* sent = nullptr) {
    const Placed placed(rows, shift, &random_);
    const Sent expected = Expected(rows, placed, left_out);
    const Input words(expected.message.data(), expected.message.size(), shift * sizeof(int32_t));
    const auto* const received = reinterpret_cast<const int32_t*>(words.get());
    place_.ForEach([&] {
      ASSERT_NO_FATAL_FAILURE(CheckPack(placed, left_out, expected));
      ASSERT_NO_FATAL_FAILURE(CheckUnpack(placed, received, expected));
      ASSERT_NO_FATAL_FAILURE(CheckAddresses(placed, received, expected));
    });
    if (sent != nullptr) *sent = expected;
  }

  Place place_;
  Random random_{99};

 private:
  void CheckPack(const Placed& placed, const std::vector<size_t>& left_out, const Sent& expected) {
    std::vector<const void*> from = Pointers(placed.rows);
    for (const size_t t : left_out) from[t] = nullptr;
    Output words = placed.Words();
    const Status status = PackAt(place_, placed.layout, from, AsWords(words.get()));
    ASSERT_TRUE(status.ok()) << status.message();
    ASSERT_EQ(words.Take(), expected.message);
  }

  void CheckUnpack(const Placed& placed, const int32_t* words, const Sent& expected) {
    std::vector<Output> unpacked = placed.Unpacked();
    const Status status =
        UnpackAt(place_, placed.layout, words, Pointers(placed.own), Pointers(&unpacked));
    ASSERT_TRUE(status.ok()) << status.message();
    for (size_t t = 0; t < unpacked.size(); ++t) {
      ASSERT_EQ(unpacked[t].Take(), expected.vectors[t]) << "table " << t;
    }
  }

  // Rows that need no conversion must be found in place.
  void CheckAddresses(const Placed& placed, const int32_t* words, const Sent& expected) {
    const WireLayout& layout = placed.layout;
    const std::vector<const void*> own = Pointers(placed.own);
    const auto check_table = [&](size_t t, const void* const* found) {
      const WireTable& table = layout.tables()[t];
      const size_t bytes = RowBytes(table);
      size_t row = 0;
      for (uint32_t rank = 0; rank < layout.ranks(); ++rank) {
        const char* in_place = nullptr;
        if (rank == layout.self()) {
          in_place = static_cast<const char*>(own[t]);
        } else if (Unchanged(table)) {
          in_place = reinterpret_cast<const char*>(words) + expected.sections[t][rank];
        }
        for (size_t r = 0; r < layout.section(t, rank).rows; ++r, ++row) {
          ASSERT_EQ(memcmp(found[row], expected.vectors[t].data() + row * bytes, bytes), 0)
              << "rank " << rank << ", row " << r;
          if (in_place != nullptr) {
            ASSERT_EQ(found[row], in_place + r * bytes);
          }
        }
      }
    };
    const Status status =
        FindRowsAt(place_, layout, words, own, [&](const std::vector<const void* const*>& found) {
          ASSERT_EQ(found.size(), layout.tables().size());
          for (size_t t = 0; t < found.size(); ++t) {
            SCOPED_TRACE(testing::Message() << "table " << t);
            ASSERT_NO_FATAL_FAILURE(check_table(t, found[t]));
          }
        });
    ASSERT_TRUE(status.ok()) << status.message();
  }
};

}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_WIRE_FIXTURE_H_
