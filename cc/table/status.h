// Status: the result of every function of this library that can fail. The only exception is
// std::bad_alloc, which is thrown when the heap is exhausted. A function that throws it leaves its
// object in the same state as one that returns an error. The operators convert it to an error.
#ifndef DYNEMB_TABLE_STATUS_H_
#define DYNEMB_TABLE_STATUS_H_

#include <string>
#include <utility>

namespace dynemb {

// The subset of the usual canonical codes that this library uses.
enum class Code {
  kOk,
  kInvalidArgument,
  kResourceExhausted,
  kFailedPrecondition,
  kDataLoss,
  kInternal
};

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  Code code_ = Code::kOk;
  std::string message_;
};

inline Status InvalidArgument(std::string m) { return {Code::kInvalidArgument, std::move(m)}; }
inline Status ResourceExhausted(std::string m) { return {Code::kResourceExhausted, std::move(m)}; }
inline Status FailedPrecondition(std::string m) {
  return {Code::kFailedPrecondition, std::move(m)};
}
inline Status DataLoss(std::string m) { return {Code::kDataLoss, std::move(m)}; }
inline Status Internal(std::string m) { return {Code::kInternal, std::move(m)}; }

}  // namespace dynemb

// Returns from the calling function if `expr` is not ok:
//   DYNEMB_RETURN_IF_ERROR(table.Reserve(n));
#define DYNEMB_RETURN_IF_ERROR(expr)               \
  do {                                             \
    ::dynemb::Status dynemb_status = (expr);       \
    if (!dynemb_status.ok()) return dynemb_status; \
  } while (false)

#endif  // DYNEMB_TABLE_STATUS_H_
