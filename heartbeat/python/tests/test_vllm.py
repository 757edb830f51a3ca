"""The plugin against fakes with the shapes of five versions of vLLM: what the core's page says of requests, steps and tokens."""
import os
import sys
import types
import unittest

import fake
from cored import Cored
from look import records


class CoreTest(Cored):
    def test_a_request_s_way_in_every_version(self):
        for version in fake.VERSIONS:
            for batch_queue in (False, True):
                for register_first in (False, True):
                    with self.subTest(version=version, batch_queue=batch_queue, register_first=register_first):
                        self.one_way(*self.engine(version, batch_queue=batch_queue, register_first=register_first), batch_queue)
                        self.assertEqual([line for line in self.told if "withdrawn" in line], [])

    def test_what_the_core_ends_by_itself_owes_nothing(self):
        def before(modules):
            original = modules["vllm.v1.engine.core"].EngineCore.add_request

            def add_request(core, request, *args):
                original(core, request, *args)
                if getattr(request, "abort_immediately", False):
                    core.abort_requests([request.request_id])
            modules["vllm.v1.engine.core"].EngineCore.add_request = add_request

        for ends in ("as it comes", "in the scheduler"):
            with self.subTest(ends=ends):
                engine, core = self.engine(fake.VERSIONS[-1], before=before)
                engine.add_request(core.Request("live", 4, 10**6))
                engine._process_engine_step()
                for number in range(20):
                    request = core.Request(f"r{number}", 8000, 2)
                    request.abort_immediately = ends == "as it comes"
                    engine.add_request(request)
                    if ends == "in the scheduler":
                        engine.scheduler.finish(request.request_id)
                    engine._process_engine_step()
                seen = self.page()
                self.assertEqual((seen["running"], seen["waiting"], seen["prompt_tokens_owed"]), (1, 0, 0))

    def test_a_step_of_decode_changes_no_more_than_its_start(self):
        engine, core = self.engine("0.32.0")
        engine.add_request(core.Request("a", 4, 9))
        for _ in range(3):
            engine._process_engine_step()
        before, during = self.page(), []
        engine.scheduler.update_from_output = self.spied(engine.scheduler.update_from_output, during)
        engine._process_engine_step()
        started = during[0]["step_started_ns"]
        self.assertGreater(started, before["published_ns"])
        self.assertEqual(during[0], {**before, "seq": before["seq"] + 2, "step_started_ns": started, "published_ns": started})

    def test_the_short_way_of_a_step_of_decode_says_what_the_long_one_does(self):
        seen = []
        for short in (True, False):
            engine, core = self.engine("0.32.0")
            engine.add_request(core.Request("long", 4, 9))
            engine.add_request(core.Request("short", 4, 5))
            beat = sys.modules["truebeat_heartbeat.vllm_core"]._beat
            seen.append([])
            for step in range(7):
                if step == 5:  # one has just left, and another comes: as many run as before
                    engine.add_request(core.Request("late", 1, 9))
                if not short:
                    beat.decoding = -1
                engine._process_engine_step()
                times = ("published_ns", "phase_entered_ns", "pid_start_ticks")
                seen[-1].append({name: value for name, value in self.page().items() if name not in times})
            lines = records(os.path.join(self.dir, "rank-0.beat"))
            seen[-1] += [{name: value for name, value in line.items() if not name.endswith("_ns")} for line in lines]
        self.assertEqual(seen[0], seen[1])
        self.assertEqual((seen[0][6]["tokens_delivered"], seen[0][6]["requests_finished"]), (14, 1))

    def test_the_last_batch_to_come_back_ends_the_decode_although_nothing_has_run_for_a_while(self):
        engine, core = self.engine("0.32.0", batch_queue=True)
        engine.add_request(core.Request("a", 1, 10**6))
        while self.page()["phase"] != "decode":
            engine._process_engine_step()
        engine.abort_requests(["a"])  # ended by its client before the batch that was handed out is back
        self.assertEqual(engine.batch_queue.count(), 1)
        seen = []
        while engine.batch_queue.count():
            engine._process_engine_step()
            seen.append((self.page()["phase"], self.page()["running"]))
        self.assertEqual((seen[0], seen[-1]), (("decode", 0), ("idle", 0)))

    def test_one_prompt_that_leaves_as_another_comes_is_on_the_page_when_the_next_step_begins(self):
        engine, core = self.engine("0.32.0")
        engine.add_request(core.Request("a", 4, 9))
        for _ in range(3):
            engine._process_engine_step()
        engine.scheduler.paused = "new"  # who comes waits
        owed = []
        for number, prompt in enumerate((70, 300)):
            engine.abort_requests(list(engine.scheduler.requests)[1:])
            engine.add_request(core.Request("b%d" % number, prompt, 2))
            during = []
            engine.scheduler.update_from_output = self.spied(core.Scheduler.update_from_output.__get__(engine.scheduler), during)
            engine.scheduler.schedule = self.decodes_the_first(engine.scheduler)
            engine._process_engine_step()
            owed.append((during[0]["running"], during[0]["waiting"], during[0]["prompt_tokens_owed"]))
        self.assertEqual(owed, [(1, 1, 70), (1, 1, 300)])

    def decodes_the_first(self, scheduler):
        counts = {scheduler.running[0].request_id: 1}
        return lambda: types.SimpleNamespace(num_scheduled_tokens=counts, total_num_scheduled_tokens=1, scheduled_spec_decode_tokens={},
                                             brings=set(counts))

    def test_tokens_are_counted_one_by_one_where_a_batch_may_bring_several(self):
        for drafted, brought in (({}, 1), ({"a": [5, 6]}, 3)):
            engine, core = self.engine("0.32.0")
            engine.add_request(core.Request("a", 4, 99))
            for _ in range(3):
                engine._process_engine_step()
            before = self.page()["tokens_delivered"]
            tokens = 1 + sum(map(len, drafted.values()))
            engine.scheduler.schedule = lambda: types.SimpleNamespace(
                num_scheduled_tokens={"a": tokens}, total_num_scheduled_tokens=tokens, scheduled_spec_decode_tokens=drafted)
            engine.scheduler.update_from_output = lambda output: [types.SimpleNamespace(new_token_ids=[7] * brought)]
            engine._process_engine_step()
            self.assertEqual(self.page()["tokens_delivered"] - before, brought)

    def test_of_two_batches_under_way_the_older_one_is_what_comes_back(self):
        engine, core = self.engine("0.32.0", batch_queue=True)
        engine.add_request(core.Request("a", 4, 99))
        engine._process_engine_step()
        beat = sys.modules["truebeat_heartbeat.vllm_core"]._beat
        outputs = types.SimpleNamespace(outputs=[types.SimpleNamespace(new_token_ids=[7, 8])])
        decodes, drafts = (1, 0, 1, 1, None), (1, 0, 3, 1, ())
        for flight, tokens in (((decodes, drafts), 1), ((drafts, decodes), 2)):
            beat.flight.clear()
            beat.flight.extend(flight)
            before = beat.tokens
            beat.counts(({0: outputs}, True))
            self.assertEqual(beat.tokens - before, tokens)

    def test_an_answer_without_tokens_is_one(self):
        engine, core = self.engine("0.32.0")
        beat = sys.modules["truebeat_heartbeat.vllm_core"]._beat
        pooled = [types.SimpleNamespace(new_token_ids=[], pooling_output=0.5), types.SimpleNamespace(new_token_ids=[], pooling_output=None)]
        beat.counts(({0: types.SimpleNamespace(outputs=pooled)}, True))
        self.assertEqual(beat.tokens, 1)

    def test_of_chunks_under_way_the_page_tells_the_next_one_and_its_lease_covers_all(self):
        engine, core = self.engine("0.32.0", batch_queue=True)
        engine.add_request(core.Request("a", 4096, 1))
        engine._process_engine_step()
        beat = sys.modules["truebeat_heartbeat.vllm_core"]._beat
        for tokens in (256, 512):
            beat.launches(engine, types.SimpleNamespace(
                num_scheduled_tokens={"a": tokens}, total_num_scheduled_tokens=tokens, scheduled_spec_decode_tokens={}))
        page = self.page()
        self.assertEqual((page["phase_tokens"], page["lease_ms"]), (512, 120_000 + 12_800))

    def test_an_error_s_output_is_no_token(self):
        engine, core = self.engine("0.32.0")
        engine.add_request(core.Request("a", 4, 99))
        for _ in range(3):
            engine._process_engine_step()
        before = self.page()["tokens_delivered"]
        engine.scheduler.schedule = lambda: types.SimpleNamespace(num_scheduled_tokens={}, total_num_scheduled_tokens=0,
                                                                  scheduled_spec_decode_tokens={})
        engine.scheduler.update_from_output = lambda output: [types.SimpleNamespace(new_token_ids=[])]
        engine._process_engine_step()
        self.assertEqual(self.page()["tokens_delivered"], before)


if __name__ == "__main__":
    unittest.main()
