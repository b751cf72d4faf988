// The contract suite of Exchange on a GPU.
#include "cc/device/cuda_exchange.h"

#include <cstdlib>

#include "tests/cc/exchange_suite.h"
#include "tests/cuda/cuda_place.h"

namespace dynemb {
namespace testing_exchange {
namespace {

struct Cuda : CudaPlace {
  static Exchange& exchange() {
    Exchange* exchange = nullptr;
    const Status status = CudaExchange(/*ordinal=*/0, &exchange);
    if (!status.ok()) std::abort();
    return *exchange;
  }
};

INSTANTIATE_TYPED_TEST_SUITE_P(Cuda, ExchangeTest, Cuda);

}  // namespace
}  // namespace testing_exchange
}  // namespace dynemb
