"""What a person gives by the environment: a wrong number is told and lived with."""
import os
import unittest
from unittest import mock

import fake
from plugged import Plugged

STEP, TOKEN = "TRUEBEAT_STEP_LEASE_MS", "TRUEBEAT_TOKEN_LEASE_US"
MOST = 2**32 - 1


class SettingsTest(Plugged):
    def leases(self, **given):
        """What the page's lease is in a step with 500 prompt tokens and in one of decode, where these are given, and what is told."""
        self.told.clear()
        with mock.patch.dict(os.environ, given):
            return self.leases_as_it_is(), [line for line in self.told if "TRUEBEAT_" in line]

    def leases_as_it_is(self):
        _, (_, core, _, _) = fake.load("0.32.0", self.dir)
        engine = core.EngineCoreProc(fake.config())
        leases = []
        update = engine.scheduler.update_from_output

        def seen(output):
            leases.append(self.page()["lease_ms"])
            return update(output)
        engine.scheduler.update_from_output = seen
        engine.run_busy_loop()
        engine.add_request(core.Request("a", 500, 2))
        for _ in range(2):
            engine._process_engine_step()
        self.assertEqual((engine.scheduler.requests, self.pages()), ({}, ["rank-0.beat"]))
        return leases

    def test_a_number_is_taken_and_nothing_is_told(self):
        self.assertEqual(self.leases(), ([125_000, 120_000], []))
        self.assertEqual(self.leases(**{STEP: "60000", TOKEN: " 20000 "}), ([70_000, 60_000], []))
        self.assertEqual(self.leases(**{STEP: "", TOKEN: "0"}), ([120_000, 120_000], []))

    def test_what_is_no_number_is_told_and_the_usual_is_taken(self):
        for wrong in ("120s", "1.5", "2 min", "0x10", "s" * 10_000):
            with self.subTest(wrong=wrong[:9]):
                leases, told = self.leases(**{STEP: wrong})
                self.assertEqual((leases, len(told)), ([125_000, 120_000], 1))
                self.assertRegex(told[0], r"^truebeat: TRUEBEAT_STEP_LEASE_MS=.* is not a whole number .*: 120000 is taken")
                self.assertLess(len(told[0]), 200)

    def test_what_the_page_has_no_room_for_is_cut_to_what_it_has(self):
        for given, leases in ((str(2**32), [MOST, MOST]), (str(2**70), [MOST, MOST]), ("-5", [5_001, 1]), ("0", [5_001, 1])):
            with self.subTest(given=given):
                self.assertEqual(self.leases(**{STEP: given})[0], leases)
                self.assertIn("TRUEBEAT_STEP_LEASE_MS=%s is not within 1 and %d" % (given, MOST), self.told[0])
        self.assertEqual(self.leases(**{TOKEN: "9" * 4_000})[0], [120_000 + MOST * 500 // 1000, 120_000])
        self.assertLess(len(self.told[0]), 200)


if __name__ == "__main__":
    unittest.main()
