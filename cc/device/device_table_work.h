// DeviceTable::Work: a session whose work follows all earlier work on its tables, on any stream;
// and how a table reports failures.
#ifndef DYNEMB_DEVICE_DEVICE_TABLE_WORK_H_
#define DYNEMB_DEVICE_DEVICE_TABLE_WORK_H_

#include <exception>
#include <mutex>
#include <utility>
#include <vector>

#include "cc/device/device_table.h"

namespace dynemb {

template <class Device>
class DeviceTable<Device>::Work : public Device::Session {
 public:
  // Whether this call returns its failures itself. Otherwise the next call that returns a Status
  // reports them.
  enum class Reports { kNo, kYes };
  Work(const DeviceTable& table, Exec* exec, Reports reports = Reports::kNo)
      : Work(std::vector<const DeviceTable*>{&table}, exec, reports) {}
  // At least one table; all on one device.
  Work(std::vector<const DeviceTable*> tables, Exec* exec, Reports reports);
  ~Work();
  // Between Changes and Settled, a failure or an exception leaves the tables inconsistent.
  void Changes() { changes_ = true; }
  void Settled() { changes_ = !this->status().ok(); }
  bool changes() const { return changes_; }

 private:
  static Stream StreamFor(Exec* exec) {
    return exec != nullptr ? Device::StreamOf(*exec) : Stream{};
  }

  // Protects stream_ of all tables. It is held for a few calls of the driver.
  static std::mutex& streams_mutex() {
    static auto* const mutex = new std::mutex;
    return *mutex;
  }

  const std::vector<const DeviceTable*> tables_;
  const Stream stream_;
  const Reports reports_;
  const int exceptions_ = std::uncaught_exceptions();  // before the work
  bool changes_ = false;
};

template <class Device>
DeviceTable<Device>::Work::Work(std::vector<const DeviceTable*> tables, Exec* exec, Reports reports)
    : Device::Session(*tables[0]->device_, StreamFor(exec)),
      tables_(std::move(tables)),
      stream_(StreamFor(exec)),
      reports_(reports) {
  std::lock_guard<std::mutex> lock(streams_mutex());
  for (const DeviceTable* table : tables_) {
    if (table->stream_ != stream_) this->After(table->stream_);
  }
}

template <class Device>
DeviceTable<Device>::Work::~Work() {
  if (changes_ && std::uncaught_exceptions() > exceptions_) {
    for (const DeviceTable* table : tables_) table->Fail(ResourceExhausted("no memory"), true);
  }
  for (const DeviceTable* table : tables_) {
    if (!this->status().ok() && (changes_ || reports_ == Reports::kNo)) {
      table->Fail(this->status(), changes_);
    }
  }
  // Calls that share the lock may have used another stream in the meantime. The next session waits
  // for this stream, so this stream waits for the other one first. All of this is published before
  // the next session can see it, hence the mutex.
  std::lock_guard<std::mutex> lock(streams_mutex());
  for (const DeviceTable* table : tables_) {
    if (table->stream_ != stream_) this->After(table->stream_);
  }
  this->Publish();
  for (const DeviceTable* table : tables_) table->stream_ = stream_;
}

template <class Device>
void DeviceTable<Device>::Fail(const Status& status, bool inconsistent) const {
  std::lock_guard<std::mutex> lock(error_mutex_);
  if (!inconsistent) {
    unreported_ = status;
  } else if (inconsistent_.ok()) {
    inconsistent_ = Status(status.code(),
                           "table '" + options_.name +
                               "' is inconsistent: an operation on it failed: " + status.message());
  }
}

template <class Device>
Status DeviceTable<Device>::Error() const {
  std::lock_guard<std::mutex> lock(error_mutex_);
  if (!inconsistent_.ok()) return inconsistent_;
  const Status kept = KeptError();
  return kept.ok() ? std::exchange(unreported_, Status()) : kept;
}

}  // namespace dynemb

#endif  // DYNEMB_DEVICE_DEVICE_TABLE_WORK_H_
