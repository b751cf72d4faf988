// HoldRowsOfTasks: rows that a lookup found, in memory when a later call of the same step needs
// them. In a table with cold rows (cold_rows.h), other lookups may have moved them to files
// meanwhile.
#ifndef DYNEMB_LOOKUP_HELD_ROWS_H_
#define DYNEMB_LOOKUP_HELD_ROWS_H_

#include <algorithm>
#include <cstddef>
#include <vector>

#include "cc/table/table.h"

namespace dynemb {

// Moves the rows of tasks on tables with cold rows to memory, and points their `rows` to the row
// ids of now, in (*held)[task]. The rows of all tasks on a table are then in memory together.
// num_keys(task) is the number of keys and rows of a task.
template <class Task, class NumKeys>
Status HoldRowsOfTasks(Exec& exec, std::vector<Task>* tasks, const NumKeys& num_keys,
                       std::vector<std::vector<RowId>>* held) {
  std::vector<Table*> done;
  for (const Task& first : *tasks) {
    Table* const table = first.table;
    if (!table->has_cold_rows() || std::find(done.begin(), done.end(), table) != done.end()) {
      continue;
    }
    done.push_back(table);
    std::vector<Table::HeldRows> rows;
    for (size_t t = 0; t < tasks->size(); ++t) {
      Task& task = (*tasks)[t];
      if (task.table != table) continue;
      const size_t n = num_keys(task);
      (*held)[t].assign(task.rows, task.rows + n);
      task.rows = (*held)[t].data();
      rows.push_back({{table->options().key_type, task.keys, n}, (*held)[t].data()});
    }
    DYNEMB_RETURN_IF_ERROR(table->HoldRows(exec, rows.data(), rows.size()));
  }
  return Status();
}

// Moves the cold rows of the keys of tasks to memory. The rows of all tasks on a table are then in
// memory together.
template <class Task, class NumKeys>
Status WarmTasks(Exec& exec, const std::vector<Task>& given, const NumKeys& num_keys) {
  const auto has_cold_rows = [](const Task& task) { return task.table->has_cold_rows(); };
  if (std::none_of(given.begin(), given.end(), has_cold_rows)) return Status();
  std::vector<Task> tasks = given;
  std::vector<std::vector<RowId>> none(tasks.size()), held(tasks.size());
  for (size_t t = 0; t < tasks.size(); ++t) {
    if (!has_cold_rows(tasks[t])) continue;
    none[t].assign(num_keys(tasks[t]), kNoRow);
    tasks[t].rows = none[t].data();
  }
  return HoldRowsOfTasks(exec, &tasks, num_keys, &held);
}

}  // namespace dynemb

#endif  // DYNEMB_LOOKUP_HELD_ROWS_H_
