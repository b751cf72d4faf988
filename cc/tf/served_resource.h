// ServedResource: a table of an exported model as a TensorFlow resource. Operators that look up
// keys accept its handle like a trained table's handle; GetTable resolves it.
//
//   DynembServedTable creates it, without rows
//   DynembOpenServedTable opens the model's snapshots, and attaches the table
//   GetTable(ctx, handle) → Resolve → the ServedTable of the state that this step uses
//
// Python's class for it is ServedTable (tf_dynemb/variables/served.py). Here a ServedTable is the
// table of one state.
//
// A step (a Session::Run, or a call of a function from Python) uses one state of each model, even
// if a delta is applied while it runs: ServedModel::StateOf remembers the state that the first
// lookup of a step has used.
#ifndef DYNEMB_TF_SERVED_RESOURCE_H_
#define DYNEMB_TF_SERVED_RESOURCE_H_

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cc/serving/served_model.h"
#include "cc/tf/table_resource.h"

namespace dynemb {

class ServedResource final : public TableResource {
 public:
  explicit ServedResource(ServedOptions options);
  ~ServedResource() override;
  ServedResource* served() override { return this; }
  const ServedOptions& options() const { return options_; }
  std::string DebugString() const override;
  int64_t MemoryUsed() const override { return 0; }

  // Opens the snapshots that `descriptor` names (served_model.h).
  absl::Status Open(Exec& exec, const std::string& descriptor);
  // The model, and the number of this table in its states. FailedPrecondition: Open did not run.
  absl::Status Get(std::shared_ptr<ServedModel>* model, size_t* number) const;

 private:
  const ServedOptions options_;
  mutable std::mutex mutex_;
  std::shared_ptr<ServedModel> model_;
  size_t number_ = 0;
};

// The number of the step that an operator runs in: a Session::Run, or the call of a function from
// Python, with all functions that it calls. 0 for an operator that Python runs on its own.
uint64_t StepOf(tf::OpKernelContext* ctx);

// Replaces *table, a served one, by the table of the step's state. FailedPrecondition if the
// operator is not one that only reads.
absl::Status Resolve(tf::OpKernelContext* ctx, TableRef* table);

// Gets the served table that input 0 of the operator names. InvalidArgument if it is a trained one.
absl::Status GetServed(tf::OpKernelContext* ctx, TableRef* ref, ServedResource** served);

// Reads the attributes `initializers` and `initializer_args`.
absl::Status ReadInitializer(tf::OpKernelConstruction* ctx, std::vector<ColumnInit>* columns);

}  // namespace dynemb

#endif  // DYNEMB_TF_SERVED_RESOURCE_H_
