"""The core's page where no step is to come: sleep, pauses, sessions that wait for their client, and calls between two steps."""
import types
import unittest

import fake
from cored import Cored


class PauseTest(Cored):
    def test_a_sleep_before_the_first_request_leaves_the_steps_as_they_are(self):
        for version in fake.VERSIONS:
            for batch_queue in (False, True):
                with self.subTest(version=version, batch_queue=batch_queue):
                    engine, core = self.engine(version, batch_queue=batch_queue)
                    engine.sleep()
                    self.assertEqual(self.page()["phase"], "sleep")
                    engine.wake_up()
                    self.one_way(engine, core, batch_queue)

    def test_aborts_and_sleep(self):
        engine, core = self.engine("0.18.0")
        engine.add_request(core.Request("a", 2000, 3))
        engine._process_engine_step()
        self.assertEqual(self.page()["prompt_tokens_owed"], 2000 - 512)
        engine.abort_requests(["a"])
        engine.pause_scheduler()
        self.assertEqual(self.page()["phase"], "sleep")
        engine.resume_scheduler()
        seen = self.page()
        self.assertEqual((seen["phase"], seen["prompt_tokens_owed"], seen["running"]), ("idle", 0, 0))
        engine.sleep()
        self.assertEqual(self.page()["phase"], "sleep")
        engine.wake_up()
        self.assertEqual(self.page()["phase"], "idle")

    def test_a_call_that_is_no_request_is_on_the_page_while_it_lasts(self):
        UTILITY, ADD = types.SimpleNamespace(name="UTILITY"), types.SimpleNamespace(name="ADD")
        for version in fake.VERSIONS:
            with self.subTest(version=version):
                engine, core = self.engine(version)
                during = []
                engine._handle_client_request(UTILITY, ("add_lora", (lambda: during.append(self.page()),)))
                self.assertEqual((during[0]["phase"], during[0]["lease_ms"]), ("load", 900_000))
                self.assertEqual((self.page()["phase"], self.page()["step_started_ns"]), ("idle", 0))
                engine._handle_client_request(ADD, core.Request("a", 4, 99))
                for _ in range(3):
                    engine._process_engine_step()
                before = self.page()

                def fails():
                    during.append(self.page())
                    raise KeyError("no such adapter")
                self.assertRaises(KeyError, engine._handle_client_request, UTILITY, ("add_lora", (fails,)))
                self.assertEqual((during[1]["phase"], during[1]["running"]), ("load", 1))
                self.assertGreater(during[1]["step_started_ns"], 0)
                after = self.page()
                same = ("phase", "running", "waiting", "lease_ms", "step_started_ns", "steps_completed")
                self.assertEqual([after[name] for name in same], [before[name] for name in same])

    def test_a_session_that_waits_for_its_client_is_no_work(self):
        engine, core = self.engine("0.32.0")
        session = core.Request("a", 10, 3)
        engine.add_request(session)
        engine._process_engine_step()

        def parked(output):
            engine.scheduler.running.remove(session)
            engine.scheduler.kv_holding_waiting.append(session)
            engine.scheduler.num_waiting_for_streaming_input += 1
            return []
        engine.scheduler.update_from_output = parked
        engine._process_engine_step()
        for _ in range(2):
            seen = self.page()
            self.assertEqual((seen["phase"], seen["running"], seen["waiting"], seen["requests_finished"]), ("idle", 0, 0, 0))
            engine.pause_scheduler()
            engine.resume_scheduler()

    def test_a_pause_that_keeps_its_requests_sleeps_once_the_last_batch_is_back(self):
        engine, core = self.engine("0.32.0", batch_queue=True)
        engine.add_request(core.Request("a", 10, 3))
        engine._process_engine_step()
        engine.pause_scheduler(mode="keep")
        engine._process_engine_step()  # the batch that was with the workers; the loop then blocks until it is resumed
        self.assertEqual(list(engine.batch_queue), [])
        seen = self.page()
        self.assertEqual((seen["phase"], seen["running"], seen["step_started_ns"]), ("sleep", 1, 0))
        engine.resume_scheduler()
        while engine.scheduler.requests or engine.batch_queue:
            engine._process_engine_step()
        self.assertEqual((self.page()["phase"], self.page()["requests_finished"]), ("idle", 1))

    def test_a_pause_that_waits_for_its_requests_is_none_before_they_are_done(self):
        engine, core = self.engine("0.32.0")
        engine.add_request(core.Request("a", 10, 3))
        engine._process_engine_step()
        engine.pause_scheduler(mode="wait")
        engine.add_request(core.Request("b", 10, 3))
        for expected in (("decode", 1, 1), ("sleep", 0, 1)):
            engine._process_engine_step()
            seen = self.page()
            self.assertEqual((seen["phase"], seen["running"], seen["waiting"]), expected)

    def test_a_pause_that_fails_half_way_is_one_all_the_same(self):
        def fails(modules):
            core = modules["vllm.v1.engine.core"].EngineCoreProc
            pauses = core.pause_scheduler

            def pause_scheduler(self, mode="abort"):
                pauses(self, mode)
                raise RuntimeError("vLLM's own")
            core.pause_scheduler = pause_scheduler
        engine, _ = self.engine("0.32.0", before=fails)
        with self.assertRaisesRegex(RuntimeError, "vLLM's own"):
            engine.pause_scheduler()
        self.assertEqual(self.page()["phase"], "sleep")


if __name__ == "__main__":
    unittest.main()
