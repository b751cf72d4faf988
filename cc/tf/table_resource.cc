#include "cc/tf/table_resource.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <exception>
#include <functional>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cc/tf/output_allocator.h"
#include "cc/tf/served_resource.h"
#include "tensorflow/core/common_runtime/device.h"
#include "tensorflow/core/common_runtime/device_mgr.h"
#include "tensorflow/core/framework/function.h"
#include "tensorflow/core/platform/logging.h"

namespace dynemb {

std::string TableResource::DebugString() const {
  return absl::StrCat("dynamic embedding table '", table_->options().name, "', dim ",
                      table_->options().dim);
}

int64_t TableResource::MemoryUsed() const {
  TableLock lock({table_.get()}, TableLock::Mode::kShared);
  const TableStats stats = table_->stats();
  return static_cast<int64_t>(stats.index_bytes + stats.row_bytes);
}

Clock& ProcessClock() {
  static Clock* const clock = new Clock;  // never destroyed: tables may live until exit
  return *clock;
}

// Reads the system's clock when the library is loaded.
[[maybe_unused]] static const Clock& kClock = ProcessClock();

// The length of the character of UTF-8 (RFC 3629, section 4) that `text`, which is not empty,
// begins with; 0 if there is none.
static size_t Utf8Length(std::string_view text) {
  const auto byte = [text](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(0);
  if (first < 0x80) return 1;
  const size_t length = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
  if (first < 0xC2 || first > 0xF4 || text.size() < length) return 0;
  for (size_t i = 1; i < length; ++i) {
    if (byte(i) >> 6 != 2) return 0;
  }
  // Neither longer than needed, nor a surrogate, nor past U+10FFFF.
  const unsigned char least = first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : 0x80;
  const unsigned char most = first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : 0xBF;
  return byte(1) >= least && byte(1) <= most ? length : 0;
}

absl::Status ToAbsl(const Status& status) {
  switch (status.code()) {
    case Code::kOk:
      return absl::OkStatus();
    case Code::kInvalidArgument:
      return absl::InvalidArgumentError(status.message());
    case Code::kResourceExhausted:
      return absl::ResourceExhaustedError(status.message());
    case Code::kFailedPrecondition:
      return absl::FailedPreconditionError(status.message());
    case Code::kDataLoss:
      return absl::DataLossError(status.message());
    case Code::kInternal:
      break;
  }
  return absl::InternalError(status.message());
}

absl::Status Decodable(const absl::Status& status) {
  const std::string_view message = status.message();
  std::string text;
  for (size_t at = 0; at < message.size();) {
    const size_t length = Utf8Length(message.substr(at));
    if (length == 0) {
      absl::StrAppend(&text, "\\x",
                      absl::Hex(static_cast<unsigned char>(message[at++]), absl::kZeroPad2));
      continue;
    }
    text += message.substr(at, length);
    at += length;
  }
  return text == message ? status : absl::Status(status.code(), text);
}

KeyType ToKeyType(tf::DataType dtype) {
  return dtype == tf::DT_INT32    ? KeyType::kInt32
         : dtype == tf::DT_UINT64 ? KeyType::kUint64
                                  : KeyType::kInt64;
}
DType ToDType(tf::DataType dtype) {
  return dtype == tf::DT_HALF       ? DType::kFloat16
         : dtype == tf::DT_BFLOAT16 ? DType::kBfloat16
                                    : DType::kFloat32;
}
tf::DataType ToTf(KeyType type) {
  return type == KeyType::kInt32    ? tf::DT_INT32
         : type == KeyType::kUint64 ? tf::DT_UINT64
                                    : tf::DT_INT64;
}
tf::DataType ToTf(DType type) {
  return type == DType::kFloat16    ? tf::DT_HALF
         : type == DType::kBfloat16 ? tf::DT_BFLOAT16
                                    : tf::DT_FLOAT;
}

namespace {

// Warns of jumps of the system's clock: of the first, and whenever their number has doubled.
void SayJumps() {
  static std::atomic<uint64_t> said{0};
  const SystemTime::Jumps jumps = SystemTime::OfProcess().jumps();
  uint64_t before = said;
  do {
    if (jumps.count == 0 || jumps.count < 2 * before) return;
  } while (!said.compare_exchange_weak(before, jumps.count));
  const auto seconds = static_cast<int64_t>(std::llround(static_cast<double>(jumps.last_ns) / 1e9));
  LOG(WARNING) << "tf_dynemb: the system's clock was set "
               << (seconds > 0 ? absl::StrCat("ahead by ", seconds, " s")
                               : absl::StrCat("back by ", -seconds,
                                              " s, or is behind a time in a file by as much"))
               << " (" << jumps.count << " such jumps in this process). Rows do not age by it.";
}

}  // namespace

void DynembOp::Compute(tf::OpKernelContext* ctx) {
  try {
    const absl::Status status = Run(ctx);
    SayJumps();
    OP_REQUIRES_OK(ctx, Decodable(status));
  } catch (const std::bad_alloc&) {
    ctx->SetStatus(absl::ResourceExhaustedError(absl::StrCat(name(), ": out of memory")));
  } catch (const std::exception& e) {
    ctx->SetStatus(absl::InternalError(absl::StrCat(name(), ": ", e.what())));
  }
}

absl::Status GetTable(tf::OpKernelContext* ctx, const tf::Tensor& handle, TableRef* table) {
  TF_RETURN_IF_ERROR(CheckScalar(handle, "handle"));
  TF_RETURN_IF_ERROR(tf::LookupResource(ctx, handle.scalar<tf::ResourceHandle>()(), table));
  return (*table)->served() == nullptr ? absl::OkStatus() : Resolve(ctx, table);
}

absl::Status GetTableOnAnyDevice(tf::OpKernelContext* ctx, const tf::Tensor& handle,
                                 TableRef* table) {
  TF_RETURN_IF_ERROR(CheckScalar(handle, "handle"));
  const auto& resource = handle.scalar<tf::ResourceHandle>()();
  if (resource.device() == ctx->device()->attributes().name()) {
    return GetTable(ctx, handle, table);
  }
  TF_RETURN_IF_ERROR(resource.ValidateType<TableResource>());
  TableResource* found = nullptr;
  if (resource.IsRefCounting()) {
    TF_ASSIGN_OR_RETURN(found, resource.GetResource<TableResource>());
    found->Ref();
  } else {
    // Each device has its own resource manager.
    tf::Device* device = nullptr;
    TF_RETURN_IF_ERROR(
        ctx->function_library()->device_mgr()->LookupDevice(resource.device(), &device));
    TF_RETURN_IF_ERROR(
        device->resource_manager()->Lookup(resource.container(), resource.name(), &found));
  }
  table->reset(found);
  return found->served() == nullptr ? absl::OkStatus() : Resolve(ctx, table);
}

absl::Status GetTables(tf::OpKernelContext* ctx, int first, int n, std::vector<TableRef>* refs,
                       std::vector<Table*>* tables) {
  for (int i = first; i < first + n; ++i) {
    TableRef ref;
    TF_RETURN_IF_ERROR(GetTable(ctx, ctx->input(i), &ref));
    tables->push_back(&ref->table());
    refs->push_back(std::move(ref));
  }
  return absl::OkStatus();
}

absl::Status ErrorOf(const std::vector<Table*>& tables) {
  for (const Table* table : tables) DYNEMB_RETURN_IF_LIBRARY_ERROR(table->Error());
  return absl::OkStatus();
}

absl::Status CommonLookups(const std::vector<TableRef>& tables, Lookups** lookups) {
  *lookups = &tables.front()->lookups();
  for (const TableRef& other : tables) {
    if (&other->lookups() == *lookups) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "table '", tables.front()->table().options().name, "' and table '",
        other->table().options().name, "' of one call are in the memories of different devices"));
  }
  return absl::OkStatus();
}

absl::Status SumGradients(Lookups* lookups, Exec& exec, const std::vector<BackwardTask>& tasks,
                          const std::function<absl::Status(size_t task, int64_t unique,
                                                           BackwardOutput* output)>& allocate) {
  Placing placing;
  return placing.Result(lookups->SumGradients(
      exec, tasks, [&](size_t task, size_t num_unique, BackwardOutput* output) {
        return placing.Keep(allocate(task, static_cast<int64_t>(num_unique), output));
      }));
}

absl::Status OneTableOp::Run(tf::OpKernelContext* ctx) {
  TableRef ref;
  TF_RETURN_IF_ERROR(GetTable(ctx, ctx->input(0), &ref));
  TF_RETURN_IF_ERROR(Run(ctx, ref->table()));
  return ToAbsl(ref->table().Error());
}

absl::Status CheckKeys(const Table& table, const tf::Tensor& keys, const char* name) {
  const tf::DataType want = ToTf(table.options().key_type);
  if (keys.dtype() == want) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      name, " has dtype ", tf::DataTypeString(keys.dtype()), ", but the keys of table '",
      table.options().name, "' are ", tf::DataTypeString(want)));
}

KeySpan KeysOf(const tf::Tensor& keys) {
  return {ToKeyType(keys.dtype()), keys.data(), static_cast<size_t>(keys.NumElements())};
}

absl::Status CheckVectors(const tf::Tensor& keys, const tf::Tensor& values, int64_t dim,
                          const char* name) {
  tf::TensorShape shape = keys.shape();
  TF_RETURN_IF_ERROR(shape.AddDimWithStatus(dim));
  return CheckShape(values, shape, name);
}

absl::Status CheckDType(const Table& table, tf::DataType dtype, const char* name) {
  const tf::DataType want = ToTf(table.options().dtype);
  if (dtype == want) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(name, " has dtype ", tf::DataTypeString(dtype), ", but the vectors of table '",
                   table.options().name, "' are ", tf::DataTypeString(want)));
}

absl::Status CheckShape(const tf::Tensor& tensor, const tf::TensorShape& shape, const char* name) {
  if (tensor.shape() == shape) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(name, " has shape ", tensor.shape().DebugString(),
                                                 ", expected ", shape.DebugString()));
}

absl::Status CheckShape(const tf::Tensor& tensor, std::initializer_list<int64_t> dims,
                        const char* name) {
  const auto have = tensor.shape().dim_sizes();
  if (std::equal(have.begin(), have.end(), dims.begin(), dims.end())) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(name, " has shape ", tensor.shape().DebugString(),
                                                 ", expected [", absl::StrJoin(dims, ","), "]"));
}

absl::Status CheckScalar(const tf::Tensor& tensor, const char* name) {
  return CheckShape(tensor, tf::TensorShape(), name);
}

absl::Status CheckWidth(int64_t width, const char* name) {
  if (width >= 1 && width <= int64_t{1} << 20) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(name, " has vectors of width ", width, ", expected 1 to 2^20"));
}

absl::Status AllocateOutput(tf::OpKernelContext* ctx, int index, const tf::TensorShape& shape,
                            void** data) {
  const tf::DataType dtype = ctx->expected_output_dtype(index);
  const auto elements = static_cast<size_t>(shape.num_elements());
  if (OnGpu(ctx) || !tf::DataTypeCanUseMemcpy(dtype) ||
      elements < OutputAllocator::kSmallest / static_cast<size_t>(tf::DataTypeSize(dtype))) {
    tf::Tensor* tensor = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(index, shape, &tensor));
    *data = tensor->data();
    return absl::OkStatus();
  }
  const tf::Tensor tensor(OutputAllocator::Get(), dtype, shape);
  if (!tensor.IsInitialized()) {
    return absl::ResourceExhaustedError(
        absl::StrCat("no memory for an output of shape ", shape.DebugString()));
  }
  *data = tensor.data();
  ctx->set_output(index, tensor);
  return absl::OkStatus();
}

}  // namespace dynemb
