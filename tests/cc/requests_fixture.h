// Messages as they are received, the keys that they request, and the fixture that is typed by
// Places. For the tests of Requests, on a device ReceiveKeys.
#ifndef DYNEMB_TESTS_CC_REQUESTS_FIXTURE_H_
#define DYNEMB_TESTS_CC_REQUESTS_FIXTURE_H_

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "cc/device/route.h"
#include "cc/lookup/route.h"
#include "tests/cc/exact_memory.h"
#include "tests/cc/places.h"

namespace dynemb {

// Received messages: all words, and the number of words of each message.
struct Messages {
  std::vector<KeyType> key_types;
  std::vector<int32_t> words, splits;
  uint32_t self = kNoRank;
  std::vector<int32_t> own{};
};

// The received keys, or the error.
struct ReceivedKeys {
  std::string error;
  std::vector<std::vector<int64_t>> counts;  // [tables][ranks]
  std::vector<std::vector<char>> keys;       // [tables]

  // The keys of a table. 32-bit keys are zero-extended.
  std::vector<uint64_t> Values(size_t t, KeyType type) const {
    std::vector<uint64_t> values(keys[t].size() / SizeOf(type));
    for (size_t i = 0; i < values.size(); ++i) {
      std::memcpy(&values[i], &keys[t][i * SizeOf(type)], SizeOf(type));
    }
    return values;
  }
};

// Calls fn(received) with messages in memory of their exact size.
template <class Fn>
void WithReceived(const Messages& messages, const Fn& fn) {
  const Exact<int32_t> words(messages.words), splits(messages.splits), own(messages.own);
  Requests::Received received;
  received.words = words.p.get();
  received.num_words = static_cast<int64_t>(words.n);
  received.splits = splits.p.get();
  received.ranks = static_cast<uint32_t>(splits.n);
  received.self = messages.self;
  received.own = own.p.get();
  received.num_own_words = static_cast<int64_t>(own.n);
  fn(received);
}

// Messages of random keys. If `self` is a rank, its message is separate.
inline Messages RandomMessages(uint32_t ranks, size_t tables, uint32_t self, uint64_t most,
                               std::mt19937_64* random) {
  Messages messages;
  messages.self = self;
  for (size_t t = 0; t < tables; ++t) {
    messages.key_types.push_back(static_cast<KeyType>((*random)() % 3));
  }
  for (uint32_t r = 0; r < ranks; ++r) {
    std::vector<int32_t> message(tables);
    size_t key_words = 0;
    for (size_t t = 0; t < tables; ++t) {
      const uint64_t n = (*random)() % 3 == 0 ? 0 : (*random)() % most;
      message[t] = static_cast<int32_t>(n);
      key_words += n * SizeOf(messages.key_types[t]) / 4;
    }
    for (; key_words > 0; --key_words) message.push_back(static_cast<int32_t>((*random)()));
    std::vector<int32_t>& to = r == self ? messages.own : messages.words;
    to.insert(to.end(), message.begin(), message.end());
    messages.splits.push_back(r == self ? 0 : static_cast<int32_t>(message.size()));
  }
  return messages;
}

// The keys in the messages, by the layout in route.h; `error` is "invalid" if a message is not one
// that a rank with these tables can have written.
inline ReceivedKeys Expected(const Messages& messages) {
  const size_t tables = messages.key_types.size(), ranks = messages.splits.size();
  const ReceivedKeys invalid{"invalid", {}, {}};
  ReceivedKeys result{"", {}, std::vector<std::vector<char>>(tables)};
  result.counts.resize(tables);
  size_t begin = 0;
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    const int64_t split = messages.splits[rank];
    if (split < 0 || split > static_cast<int64_t>(messages.words.size() - begin)) return invalid;
    if (rank == messages.self && split != 0) return invalid;
    const auto at = messages.words.begin() + static_cast<std::ptrdiff_t>(begin);
    const std::vector<int32_t> message =
        rank == messages.self ? messages.own : std::vector<int32_t>(at, at + split);
    begin += static_cast<size_t>(split);
    if (message.size() < tables) return invalid;
    size_t word = tables;
    for (size_t t = 0; t < tables; ++t) {
      if (message[t] < 0) return invalid;
      const size_t bytes = static_cast<size_t>(message[t]) * SizeOf(messages.key_types[t]);
      if (bytes > 4 * (message.size() - word)) return invalid;
      const char* const keys = reinterpret_cast<const char*>(message.data() + word);
      result.keys[t].insert(result.keys[t].end(), keys, keys + bytes);
      result.counts[t].push_back(message[t]);
      word += bytes / 4;
    }
    if (word != message.size()) return invalid;
  }
  return begin == messages.words.size() ? result : invalid;
}

inline ReceivedKeys ReceiveAt(HostPlace&, const Requests::Received& received,
                              const std::vector<KeyType>& key_types) {
  ReceivedKeys result;
  Requests requests;
  const Status status = requests.Init(received, key_types);
  result.error = status.message();
  if (!status.ok()) {
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    return result;
  }
  for (size_t t = 0; t < key_types.size(); ++t) {
    result.counts.emplace_back();
    int64_t sum = 0;
    for (uint32_t r = 0; r < received.ranks; ++r) {
      result.counts[t].push_back(requests.count(t, r));
      sum += requests.count(t, r);
    }
    EXPECT_EQ(requests.num_keys(t), sum);
    const Exact<char> keys(static_cast<size_t>(sum) * SizeOf(key_types[t]));
    requests.CopyKeys(t, keys.p.get());
    result.keys.push_back(keys.values());
  }
  return result;
}
// The errors are the same as on the host.
template <class Device>
ReceivedKeys ReceiveAt(DevicePlace<Device>& at, const Requests::Received& received,
                       const std::vector<KeyType>& key_types) {
  ReceivedKeys result;
  std::vector<Exact<uint64_t>> keys;
  std::vector<size_t> bytes;
  const auto allocate = [&](size_t t, const int64_t* counts, void** to) {
    EXPECT_EQ(t, result.counts.size());
    result.counts.emplace_back(counts, counts + received.ranks);
    size_t n = 0;
    for (uint32_t r = 0; r < received.ranks; ++r) n += static_cast<size_t>(counts[r]);
    bytes.push_back(n * SizeOf(key_types[t]));
    keys.emplace_back((bytes.back() + 7) / 8);
    *to = keys.back().p.get();
    return Status();
  };
  const bool waits = received.ranks != 0 && !key_types.empty();
  const Status status = at.Call(
      [&](auto& session) { return device::ReceiveKeys(session, received, key_types, allocate); },
      waits ? 1 : 0);
  result.error = status.message();
  Requests on_host;
  EXPECT_EQ(status.message(), on_host.Init(received, key_types).message());
  EXPECT_EQ(bytes.size(), status.ok() ? key_types.size() : 0u);
  if (!status.ok()) {
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
  }
  for (size_t t = 0; t < bytes.size(); ++t) {
    const char* const begin = reinterpret_cast<const char*>(keys[t].p.get());
    result.keys.emplace_back(begin, begin + bytes[t]);
  }
  return result;
}

template <class Place>
class RequestsFixture : public testing::Test {
 protected:
  // Returns the error; empty if the messages were read.
  std::string Read(const Messages& messages, ReceivedKeys* keys = nullptr) {
    ReceivedKeys result;
    WithReceived(messages, [&](const Requests::Received& received) {
      result = ReceiveAt(place_, received, messages.key_types);
    });
    const ReceivedKeys expected = Expected(messages);
    EXPECT_EQ(result.error.empty(), expected.error.empty()) << result.error;
    EXPECT_EQ(result.counts, expected.counts);
    EXPECT_EQ(result.keys, expected.keys);
    if (keys != nullptr) *keys = result;
    return result.error;
  }

  Place place_;
};

}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_REQUESTS_FIXTURE_H_
