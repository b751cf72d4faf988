// Ranks that are threads of a test, and their wires over Gloo.
#ifndef DYNEMB_TESTS_CC_GLOO_WIRES_H_
#define DYNEMB_TESTS_CC_GLOO_WIRES_H_

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cc/ranks/gloo_wire.h"

namespace dynemb {

// Runs f(r) for each rank r, in a thread for each.
inline void OnRanks(int size, const std::function<void(int)>& f) {
  std::vector<std::thread> threads;
  for (int r = 0; r < size; ++r) threads.emplace_back(f, r);
  for (std::thread& t : threads) t.join();
}

// The wires of a group, connected.
inline std::vector<std::unique_ptr<Wire>> Connected(int size, std::chrono::milliseconds timeout) {
  std::vector<std::unique_ptr<GlooWire>> wires(static_cast<size_t>(size));
  OnRanks(size, [&](int r) {
    const Status status =
        GlooWire::Listen(r, size, "127.0.0.1", timeout, &wires[static_cast<size_t>(r)]);
    ASSERT_TRUE(status.ok()) << status.message();
  });
  OnRanks(size, [&](int r) {
    std::vector<std::string> addresses;
    for (const auto& wire : wires) addresses.push_back(wire->addresses()[static_cast<size_t>(r)]);
    const Status status = wires[static_cast<size_t>(r)]->Connect(addresses);
    ASSERT_TRUE(status.ok()) << status.message();
  });
  std::vector<std::unique_ptr<Wire>> result;
  for (auto& wire : wires) result.push_back(std::move(wire));
  return result;
}

}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_GLOO_WIRES_H_
