// Linked into a test on the stand-in for CUDA: no test breaks a rule of CUDA.
#include <gtest/gtest.h>

#include "tests/fake_cuda/fake_cuda.h"

namespace dynemb::fake_cuda {
namespace {

class Rules : public ::testing::EmptyTestEventListener {
  void OnTestEnd(const ::testing::TestInfo& info) override {
    if (TakeMisuses() != 0) ADD_FAILURE() << info.name() << " broke rules of CUDA";
  }
};
const bool listens = [] {
  ::testing::UnitTest::GetInstance()->listeners().Append(new Rules);
  return true;
}();

}  // namespace
}  // namespace dynemb::fake_cuda
