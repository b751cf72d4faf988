// The members of DeviceTable, for the files that instantiate it.
#ifndef DYNEMB_DEVICE_DEVICE_TABLE_MEMBERS_H_
#define DYNEMB_DEVICE_DEVICE_TABLE_MEMBERS_H_

#include "cc/device/device_table_admission.h"
#include "cc/device/device_table_batch.h"
#include "cc/device/device_table_catch_up.h"
#include "cc/device/device_table_check.h"
#include "cc/device/device_table_cold.h"
#include "cc/device/device_table_cut.h"
#include "cc/device/device_table_insert.h"
#include "cc/device/device_table_room.h"
#include "cc/device/device_table_state.h"
#include "cc/device/device_table_tiers.h"
#include "cc/device/device_table_work.h"

#endif  // DYNEMB_DEVICE_DEVICE_TABLE_MEMBERS_H_
