#include "cc/tf/served_resource.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cc/serving/served_lookups.h"
#include "cc/table/hash.h"

namespace dynemb {
namespace {

// The operators that only read tables.
constexpr const char* kReaders[] = {
    "DynembContains", "DynembLookup", "DynembLookupCounted",          "DynembLookupSparse",
    "DynembSize",     "DynembStats",  "DynembLookupSparseWeightGrad", "DynembReadAgain",
};

}  // namespace

ServedResource::ServedResource(ServedOptions options)
    : TableResource(nullptr, &ServedLookups()), options_(std::move(options)) {}

ServedResource::~ServedResource() {
  if (model_ != nullptr) model_->Detach(number_);
}

std::string ServedResource::DebugString() const {
  return absl::StrCat("table '", options_.name, "' of an exported model");
}

absl::Status ServedResource::Open(Exec& exec, const std::string& descriptor) {
  std::shared_ptr<ServedModel> model;
  DYNEMB_RETURN_IF_LIBRARY_ERROR(ServedModel::Open(exec, descriptor, options_.name, &model));
  std::lock_guard<std::mutex> lock(mutex_);
  if (model == model_) return absl::OkStatus();
  size_t number = 0;
  DYNEMB_RETURN_IF_LIBRARY_ERROR(model->Attach(options_, &number));
  if (model_ != nullptr) model_->Detach(number_);
  model_ = std::move(model);
  number_ = number;
  return absl::OkStatus();
}

absl::Status ServedResource::Get(std::shared_ptr<ServedModel>* model, size_t* number) const {
  std::lock_guard<std::mutex> lock(mutex_);
  if (model_ == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat(DebugString(), " has not been opened: the model's initializer did not run"));
  }
  *model = model_;
  *number = number_;
  return absl::OkStatus();
}

uint64_t StepOf(tf::OpKernelContext* ctx) {
  if (ctx->step_id() == 0) return 0;
  // Sessions number their steps from 1, and each has its own manager of resources.
  const auto session = reinterpret_cast<uintptr_t>(ctx->resource_manager());
  return MixKey(static_cast<uint64_t>(ctx->step_id()) ^ MixKey(session)) | 1;
}

absl::Status Resolve(tf::OpKernelContext* ctx, TableRef* table) {
  const ServedResource& served = *(*table)->served();
  const std::string& op = ctx->op_kernel().type_string();
  if (std::none_of(std::begin(kReaders), std::end(kReaders),
                   [&op](const char* reader) { return op == reader; })) {
    return absl::FailedPreconditionError(
        absl::StrCat(served.DebugString(), " is read-only: ", op, " does not accept it"));
  }
  std::shared_ptr<ServedModel> model;
  size_t number = 0;
  TF_RETURN_IF_ERROR(served.Get(&model, &number));
  std::shared_ptr<const ServedState> state = model->StateOf(StepOf(ctx));
  if (number >= state->tables.size() || state->tables[number] == nullptr) {
    // The step began before the table was attached.
    state = model->state();
  }
  const std::shared_ptr<ServedTable>& found = state->tables[number];
  ServedPlace* const place = found->served().place;
  if (place == nullptr) {
    table->reset(new TableResource(found, &ServedLookups()));
  } else {
    table->reset(new TableResource(found->placed(), &place->lookups()));
  }
  return absl::OkStatus();
}

absl::Status GetServed(tf::OpKernelContext* ctx, TableRef* ref, ServedResource** served) {
  const tf::Tensor& handle = ctx->input(0);
  TF_RETURN_IF_ERROR(CheckScalar(handle, "handle"));
  TF_RETURN_IF_ERROR(tf::LookupResource(ctx, handle.scalar<tf::ResourceHandle>()(), ref));
  *served = (*ref)->served();
  if (*served != nullptr) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("handle: ", (*ref)->DebugString(), " is not a table of an exported model"));
}

absl::Status ReadInitializer(tf::OpKernelConstruction* ctx, std::vector<ColumnInit>* columns) {
  std::vector<std::string> kinds;
  std::vector<float> args;
  TF_RETURN_IF_ERROR(ctx->GetAttr("initializers", &kinds));
  TF_RETURN_IF_ERROR(ctx->GetAttr("initializer_args", &args));
  if (args.size() != 2 * kinds.size()) {
    return absl::InvalidArgumentError(absl::StrCat("initializer_args has ", args.size(),
                                                   " numbers, expected two for each of ",
                                                   kinds.size(), " initializers"));
  }
  columns->clear();
  for (size_t i = 0; i < kinds.size(); ++i) {
    const InitKind kind = kinds[i] == "uniform"            ? InitKind::kUniform
                          : kinds[i] == "normal"           ? InitKind::kNormal
                          : kinds[i] == "truncated_normal" ? InitKind::kTruncatedNormal
                                                           : InitKind::kConstant;
    columns->push_back({kind, args[2 * i], args[2 * i + 1]});
  }
  return absl::OkStatus();
}

}  // namespace dynemb
