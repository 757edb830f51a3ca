"""The pages under asynchronous scheduling: a worker's step ends when its thread is through with it, the core's when the device is."""
import importlib
import os
import threading
import unittest
from types import SimpleNamespace

import fake
from look import records
from plugged import Plugged

VERSIONS = fake.VERSIONS[2:]


def batch(*ids, tokens=1):
    counts = dict.fromkeys(ids, tokens)
    return SimpleNamespace(num_scheduled_tokens=counts, total_num_scheduled_tokens=sum(counts.values()), scheduled_spec_decode_tokens={})


class AsyncWorkerTest(Plugged):
    def worker(self, version="0.32.0", rank=0):
        """A worker that serves, whose device does nothing before it is told to."""
        _, (_, _, base, gpu) = fake.load(version, self.dir)
        worker = gpu.Worker(fake.config(2, overlaps=True), 0, rank)
        worker.load_model()
        worker.compile_or_warm_up_model()
        return base.WorkerWrapperBase(worker)

    def executes(self, wrapper, scheduler_output):
        """The calls that the core makes for one batch. Returns the promise."""
        self.assertIsNone(wrapper.execute_model(scheduler_output))
        self.assertEqual(self.said(wrapper)[2], True, "sampling is a part of the step")
        return wrapper.sample_tokens(None)

    def said(self, wrapper):
        page = self.page(wrapper.worker.rank + 1)
        return page["phase"], page["steps_completed"], page["step_started_ns"] > 0

    def outcomes(self):
        return [(line["step"], line["prefill_tokens"], line["outcome"]) for line in records(os.path.join(self.dir, "rank-1.beat"))]

    def test_a_step_ends_when_the_thread_is_through_with_it_and_the_page_is_idle_while_the_device_works(self):
        for version in VERSIONS:
            with self.subTest(version=version):
                wrapper = self.worker(version)
                during = []
                wrapper.worker.model_runner.during = lambda: during.append(self.said(wrapper))
                promises = [self.executes(wrapper, batch("a", tokens=512)), self.executes(wrapper, batch("a"))]
                self.assertEqual(during, [("prefill", 0, True), ("decode", 1, True)])
                self.assertEqual([promise.done.is_set() for promise in promises], [False, False], "the device has yet to begin")
                self.assertEqual((self.said(wrapper), self.page(1)["lease_ms"]), (("idle", 2, False), 0))
                self.assertEqual(self.outcomes(), [(1, 511, 1), (2, 0, 1)])

    def test_whatever_a_rank_has_to_say_of_its_step_it_is_through_with_it(self):
        for said in ("a promise", "passed on to the next stage", None):
            with self.subTest(said=said):
                wrapper = self.worker()
                if said != "a promise":
                    wrapper.worker.vllm_config.scheduler_config.async_scheduling = False
                    wrapper.worker.model_runner.sampled = lambda grammar_output, said=said: said
                self.executes(wrapper, batch("a"))
                self.assertEqual(self.said(wrapper), ("idle", 1, False))

    def test_who_collects_an_output_never_touches_the_page(self):
        wrapper = self.worker()
        fails, brings = self.executes(wrapper, batch("a")), self.executes(wrapper, batch("a"))
        before, answers = self.page(1), []

        def collects():
            for promise in (fails, brings):
                try:
                    answers.append(promise.get_output())
                except RuntimeError as error:
                    answers.append(str(error))
        fails.fault = RuntimeError("CUDA error: an illegal memory access was encountered")
        thread = threading.Thread(target=collects)
        thread.start()
        for promise in (fails, brings):
            promise.done.set()
        thread.join()
        self.assertEqual(answers, ["CUDA error: an illegal memory access was encountered", "output"])
        self.assertEqual((self.page(1), self.outcomes()), (before, [(1, 0, 1), (2, 0, 1)]))
        self.assertFalse(hasattr(importlib.import_module("vllm.v1.outputs").AsyncOutput.get_output, "truebeat"))

    def test_a_device_that_hangs_is_a_core_in_its_step_above_workers_that_have_done_theirs(self):
        for version in VERSIONS:
            with self.subTest(version=version):
                batches, waits = self.handed_out(version)
                self.assertEqual((len(batches), waits["phase"], waits["steps_completed"]), (3, "decode", 1))
                self.assertGreater(waits["step_started_ns"], 0)
                self.assertGreater(waits["tokens_delivered"], 0, "by that, readers know who hands out the steps")
                for rank in (0, 1):
                    wrapper = self.worker(version, rank)
                    for scheduler_output in batches:
                        self.executes(wrapper, scheduler_output)
                    # with no fewer steps than the core: none of them is behind
                    self.assertEqual(self.said(wrapper), ("idle", len(batches), False))
                self.assertEqual(self.page()["world_size"], 3)

    def handed_out(self, version):
        """What a core has given its workers when it waits for the second batch, and what its page says then."""
        _, (_, core, _, _) = fake.load(version, self.dir)
        engine = core.EngineCoreProc(fake.config(2, overlaps=True), batch_queue=True)
        engine.run_busy_loop()
        batches, waits = [], []
        schedule = engine.scheduler.schedule

        def schedules():
            batches.append(schedule())
            return batches[-1]
        engine.scheduler.schedule = schedules
        engine.comes_back = lambda output: waits.append(self.page())
        engine.add_request(core.Request("a", 4, 99))
        while len(waits) < 2:
            engine._process_engine_step()
        return batches, waits[-1]


if __name__ == "__main__":
    unittest.main()
