/* Test program: makes rank-1.beat in the directory of its argument from the golden values of heartbeat/tests/golden.rs (H9). */
#define _POSIX_C_SOURCE 200809L
#include "truebeat_heartbeat.h"

static void run_of(uint8_t *bytes, uint8_t first) {
    for (int i = 0; i < 16; i++) bytes[i] = (uint8_t)(first + i);
}

int main(int argc, char **argv) {
    struct tb_identity who = {4242, 1, 2, 2, 123456789, 0x1122334455667788u, {0}, {{0}}, 2};
    struct tb_writer page = {0};
    struct tb_beat beat = {1, 20002, 303, 4, 5, 60006, TB_PREFILL, 7007, 0, 9009, 0, 11, 12, 1};
    if (argc != 2) return 2;
    run_of(who.boot_id, 0);
    run_of(who.gpu_uuids[0], 0xa0);
    run_of(who.gpu_uuids[1], 0xc0);
    const int err = tb_open(&page, argv[1], &who);
    if (err != 0) {
        fprintf(stderr, "no page in %s: %s\n", argv[1], strerror(err));
        return 1;
    }
    tb_publish(&page, &beat);
    beat.steps_completed = 1001;
    beat.phase_entered_ns = 8000000008u;
    beat.step_started_ns = 8000000010u;
    beat.published_ns = 8000000013u;
    tb_publish(&page, &beat);
    for (uint64_t i = 0; i < 256; i++) {
        struct tb_record line = {999 + i, 7000000001u + i, 7000000002u + i, 1, 0, 1, TB_FAILED, 0};
        if (i == 1) line = (struct tb_record){1000, 7000000001u, 7000000002u, 4, 0, 4, TB_OK, 0xfeedfaceu};
        tb_record(&page, &line);
    }
    const struct tb_record last = {1256, 7900000001u, 7900000002u, 4, 7007, 3, TB_DEADLINE_EXCEEDED, 0};
    tb_record(&page, &last);
    tb_close(&page);
    return 0;
}
