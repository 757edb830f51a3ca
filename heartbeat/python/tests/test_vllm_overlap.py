"""The core's page where batches overlap: the next one is handed to the workers before the last one is back."""
import os
import types
import unittest

import fake
from look import records
from plugged import Plugged

UTILITY = types.SimpleNamespace(name="UTILITY")


class OverlapTest(Plugged):
    def engine(self, version="0.32.0", batches=2):
        _, (_, core, _, _) = fake.load(version, self.dir)
        core.BATCHES = batches
        engine = core.EngineCoreProc(fake.config(), batch_queue=True)
        engine.run_busy_loop()
        self.waits = []
        engine.comes_back = lambda output: self.waits.append(self.page())  # what the page says while the core waits for a batch
        return engine, core

    def ends(self, engine):
        while engine.scheduler.requests or engine.batch_queue.count():
            engine._process_engine_step()

    def waited(self, *names):
        return [tuple(page[name] for name in names) for page in self.waits]

    def sizes(self):
        return [(line["prefill_tokens"], line["decode_tokens"]) for line in records(os.path.join(self.dir, "rank-0.beat"))]

    def test_a_token_that_is_handed_out_before_the_prompt_is_back_is_decoded(self):
        for version in ("0.12.0", "0.18.0", "0.32.0"):
            for chunks in ([300], [512, 188]):
                with self.subTest(version=version, chunks=chunks):
                    engine, core = self.engine(version)
                    engine.add_request(core.Request("a", sum(chunks), 3))
                    self.ends(engine)
                    said = [("prefill", chunk) for chunk in chunks] + [("decode", 0)] * 2
                    self.assertEqual(self.waited("phase", "phase_tokens")[:len(said)], said)
                    self.assertEqual(self.sizes()[:len(said)], [(chunk, 0) for chunk in chunks] + [(0, 1)] * 2)

    def test_a_version_that_counts_what_is_computed_later_counts_a_prompt_to_its_last_chunk(self):
        engine, core = self.engine()
        schedule = engine.scheduler.schedule

        def later():
            output = schedule()
            for request in engine.scheduler.running:
                request.num_computed_tokens -= output.num_scheduled_tokens.get(request.request_id, 0)
            return output
        engine.scheduler.schedule = later
        engine.comes_back = lambda output: [
            setattr(request, "num_computed_tokens", request.num_computed_tokens + output.num_scheduled_tokens.get(request.request_id, 0))
            for request in engine.scheduler.running]
        engine.batch_queue.is_full = lambda: bool(engine.batch_queue.count())
        engine.add_request(core.Request("a", 700, 3))
        self.ends(engine)
        self.assertEqual(self.sizes()[:4], [(512, 0), (188, 0), (0, 1), (0, 1)])
        self.assertEqual(self.page()["prompt_tokens_owed"], 0)

    def test_the_page_says_what_the_core_waits_for_and_its_lease_covers_what_comes_behind(self):
        engine, core = self.engine()
        engine.add_request(core.Request("a", 4, 99))
        for _ in range(5):
            engine._process_engine_step()
        self.waits.clear()
        engine.add_request(core.Request("b", 300, 99))
        after = []
        for _ in range(3):
            engine._process_engine_step()
            after.append(self.page())
        said = ("phase", "phase_tokens", "lease_ms")
        decodes, both, prompt = ("decode", 0, 120_000), ("decode", 0, 123_000), ("prefill", 300, 123_000)
        self.assertEqual(self.waited(*said), [both, prompt, decodes])
        self.assertEqual([tuple(page[name] for name in said) for page in after], [prompt, decodes, decodes])
        self.assertTrue(all(page["step_started_ns"] > 0 for page in self.waits))

    def test_a_call_between_two_steps_leaves_what_is_waited_for(self):
        engine, core = self.engine(batches=3)
        engine.add_request(core.Request("a", 4, 99))
        for _ in range(5):
            engine._process_engine_step()
        engine.add_request(core.Request("b", 300, 99))
        engine._process_engine_step()  # a batch that decodes is ahead of the prompt still
        engine._handle_client_request(UTILITY, ("add_lora", (lambda: None,)))
        seen = self.page()
        self.assertEqual((seen["phase"], seen["phase_tokens"], seen["lease_ms"]), ("decode", 0, 123_000))

    def test_a_prompt_behind_several_batches_is_on_the_page_once_it_is_waited_for(self):
        engine, core = self.engine(batches=3)
        engine.add_request(core.Request("a", 4, 99))
        for _ in range(6):
            engine._process_engine_step()
        self.waits.clear()
        engine.add_request(core.Request("b", 300, 99))
        for _ in range(4):
            engine._process_engine_step()
        self.assertEqual(self.waited("phase", "phase_tokens", "lease_ms"), [
            ("decode", 0, 123_000), ("decode", 0, 123_000), ("prefill", 300, 123_000), ("decode", 0, 120_000)])

    def test_a_chunk_is_owed_until_it_is_back(self):
        for version in fake.VERSIONS:
            with self.subTest(version=version):
                engine, core = self.engine(version)
                engine.add_request(core.Request("a", 1300, 2))
                engine.add_request(core.Request("b", 2, 9))
                self.ends(engine)
                self.assertEqual(self.waited("prompt_tokens_owed")[:4], [(1302,), (788,), (276,), (0,)])
                self.assertEqual(self.page()["prompt_tokens_owed"], 0)

    def test_a_prompt_that_is_computed_anew_is_owed_whole(self):
        engine, core = self.engine()
        request = core.Request("a", 2000, 2)
        engine.add_request(request)
        for _ in range(2):
            engine._process_engine_step()
        self.assertEqual(self.page()["prompt_tokens_owed"], 2000 - 512)
        request.num_computed_tokens = 0  # preempted, with a chunk under way
        engine._process_engine_step()
        self.assertEqual(self.page()["prompt_tokens_owed"], 2000)

    def test_a_batch_that_nobody_needs_any_more_is_waited_for_all_the_same(self):
        engine, core = self.engine()
        engine.add_request(core.Request("a", 4, 9, stops_at=3))
        self.ends(engine)
        last = self.page()
        self.assertEqual((last["phase"], last["tokens_delivered"], last["requests_finished"]), ("idle", 3, 1))
        self.assertEqual(last["steps_completed"], len(self.waits))

    def test_the_parts_of_a_session_are_one_request(self):
        engine, core = self.engine()
        engine.add_request(core.Request("s", 10, 9))
        for _ in range(3):
            engine._process_engine_step()
        for part in (600, 20):
            engine.add_request(core.Request("s", part, 9))
            self.assertEqual(self.page()["requests_finished"], 0)
            engine._process_engine_step()
        seen = self.page()
        self.assertEqual((seen["requests_finished"], seen["running"]), (0, 1))
        self.ends(engine)
        seen = self.page()
        self.assertEqual((seen["phase"], seen["requests_finished"], seen["prompt_tokens_owed"]), ("idle", 1, 0))

    def test_the_next_part_of_a_session_is_owed(self):
        engine, core = self.engine()
        engine.add_request(core.Request("s", 10, 99))
        for _ in range(3):
            engine._process_engine_step()
        engine.add_request(core.Request("s", 600, 99))
        self.waits.clear()
        for _ in range(2):
            engine._process_engine_step()
        self.assertEqual(self.waited("prompt_tokens_owed", "phase_tokens"), [(600, 0), (600, 512)])

    def test_an_engine_that_cannot_be_asked_what_it_has_takes_the_request_all_the_same(self):
        engine, core = self.engine()
        kept, engine.scheduler = engine.scheduler, types.SimpleNamespace(add_request=engine.scheduler.add_request)
        engine.add_request(core.Request("a", 4, 1))
        self.assertEqual((list(kept.requests), self.pages()), (["a"], []))


if __name__ == "__main__":
    unittest.main()
