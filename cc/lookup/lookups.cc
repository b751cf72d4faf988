#include "cc/lookup/lookups.h"

#include "cc/table/scratch.h"

namespace dynemb {
namespace {

class HostLookupsImpl final : public Lookups {
 public:
  Status Pool(Exec& exec, const std::vector<PoolTask>& tasks, Tick tick, bool insert) override {
    return dynemb::Pool(exec, tasks, tick, insert);
  }

  Status WeightGradient(Exec& exec, const std::vector<WeightGradientTask>& tasks) override {
    return dynemb::WeightGradient(exec, tasks);
  }

  Status SumGradients(Exec& exec, const std::vector<BackwardTask>& tasks,
                      const Allocate& allocate) override {
    const SharedScratch<Backward> backward;
    DYNEMB_RETURN_IF_ERROR(backward->Prepare(exec, tasks.data(), tasks.size()));
    std::vector<BackwardOutput> outputs(tasks.size());
    for (size_t t = 0; t < tasks.size(); ++t) {
      DYNEMB_RETURN_IF_ERROR(allocate(t, backward->num_unique(t), &outputs[t]));
    }
    backward->Write(exec, outputs.data());
    return Status();
  }

  Status Apply(Exec& exec, const std::vector<ApplyTask>& tasks, const OptimizerStep& step,
               Tick tick) override {
    return dynemb::Apply(exec, tasks, step, tick);
  }

  Status ApplyPooled(Exec& exec, const std::vector<ApplyPooledTask>& tasks,
                     const OptimizerStep& step, Tick tick) override {
    return dynemb::ApplyPooled(exec, tasks, step, tick);
  }
};

}  // namespace

Status Lookups::PromoteIfDue(Exec& exec, const std::vector<Table*>& tables, Tick tick) {
  for (Table* table : tables) DYNEMB_RETURN_IF_ERROR(table->PromoteIfDue(exec, tick));
  return Status();
}

Lookups& HostLookups() {
  static Lookups* const lookups = new HostLookupsImpl;
  return *lookups;
}

}  // namespace dynemb
