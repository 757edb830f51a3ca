"""The plugin against the same fakes: what the workers' pages say."""
import importlib
import os
import unittest
from types import SimpleNamespace

import fake
from look import records
from plugged import Plugged


class WorkerTest(Plugged):
    def worker(self, version, rank=1, config=None):
        _, (_, core, base, gpu) = fake.load(version, self.dir)
        worker = gpu.Worker(config or fake.config(2), 0, rank)
        worker.load_model()
        return base.WorkerWrapperBase(worker), worker, core

    def test_workers_write_their_own_pages_in_every_version(self):
        for version in fake.VERSIONS:
            with self.subTest(version=version):
                wrapper, worker, core = self.worker(version)
                seen = self.page(2)
                self.assertEqual((seen["phase"], seen["rank"], seen["world_size"]), ("load", 2, 3))
                scheduler = core.Scheduler()
                scheduler.waiting += [core.Request("a", 700, 3), core.Request("b", 1, 2)]
                wrapper.execute_model(scheduler.schedule())  # a warm-up through the same door counts for nothing
                wrapper.compile_or_warm_up_model()
                self.assertEqual((self.page(2)["phase"], self.page(2)["steps_completed"]), ("idle", 0))
                during = []
                worker.model_runner.during = lambda: during.append(self.page(2))
                for _ in range(2):
                    if wrapper.execute_model(scheduler.schedule()) is None:
                        self.assertGreater(self.page(2)["step_started_ns"], 0, "sampling is a part of the step")
                        wrapper.sample_tokens(None)
                self.assertEqual((during[0]["phase"], during[0]["running"], during[0]["phase_tokens"]), ("prefill", 2, 511))
                seen = self.page(2)
                self.assertEqual((seen["phase"], seen["steps_completed"], seen["step_started_ns"]), ("idle", 2, 0))
                self.assertEqual([line for line in self.told if "missing" in line or "withdrawn" in line], [])

    def test_a_step_whose_sampling_fails_has_failed(self):
        wrapper, worker, core = self.worker("0.32.0")
        wrapper.compile_or_warm_up_model()
        worker.model_runner.sampled = None
        scheduler = core.Scheduler()
        scheduler.waiting += [core.Request("a", 1, 2)]
        wrapper.execute_model(scheduler.schedule())
        with self.assertRaises(TypeError):
            wrapper.sample_tokens(None)
        self.assertEqual(records(os.path.join(self.dir, "rank-2.beat"))[-1]["outcome"], 2)

    def test_a_worker_that_serves_comes_back_from_a_phase_of_the_start(self):
        wrapper, worker, _ = self.worker("0.32.0")
        wrapper.compile_or_warm_up_model()
        for again in (wrapper.load_model, wrapper.determine_available_memory, worker.model_runner.capture_model,
                      wrapper.compile_or_warm_up_model):
            with self.subTest(again=again.__name__):
                again()
                self.assertEqual(self.page(2)["phase"], "idle")

    def test_a_rank_that_has_nothing_to_answer_ends_its_step_where_nothing_samples(self):
        # before 0.12 all ranks but one; pooling, in a stage of a pipeline that is not the last
        for version, runner in (("0.10.1", "generate"), ("0.32.0", "pooling")):
            with self.subTest(version=version, runner=runner):
                config = fake.config(2)
                config.model_config = SimpleNamespace(runner_type=runner)
                wrapper, worker, core = self.worker(version, config=config)
                wrapper.compile_or_warm_up_model()
                worker.execute_model = lambda output: None
                scheduler = core.Scheduler()
                scheduler.waiting += [core.Request("a", 1, 2)]
                for _ in range(2):
                    self.assertIsNone(wrapper.execute_model(scheduler.schedule()))
                seen = self.page(2)
                self.assertEqual((seen["phase"], seen["steps_completed"], seen["step_started_ns"]), ("idle", 2, 0))

    def test_a_worker_of_another_platform_has_the_phases_of_its_own_class(self):
        for version in fake.VERSIONS[1:]:  # before 0.10 no step of such a worker can be hooked
            for name in ("NPUWorker", "OtherNPUWorker"):
                with self.subTest(version=version, name=name):
                    _, (_, core, base, _) = fake.load(version, self.dir)
                    worker = getattr(importlib.import_module("npu"), name)(fake.config(2), 0, 1)
                    wrapper = base.WorkerWrapperBase(worker)
                    self.assertEqual(self.page(2)["phase"], "load")
                    wrapper.determine_available_memory()
                    self.assertEqual(self.page(2)["phase"], "compile")
                    wrapper.compile_or_warm_up_model()
                    self.assertEqual(self.page(2)["phase"], "idle")
                    scheduler = core.Scheduler()
                    scheduler.waiting += [core.Request("a", 700, 3)]
                    for _ in range(2):
                        if wrapper.execute_model(scheduler.schedule()) is None:
                            self.assertGreater(self.page(2)["step_started_ns"], 0, "sampling is a part of the step")
                            wrapper.sample_tokens(None)
                    seen = self.page(2)
                    self.assertEqual((seen["phase"], seen["steps_completed"], seen["step_started_ns"]), ("idle", 2, 0))
                    wrapper.sleep()
                    self.assertEqual(self.page(2)["phase"], "sleep")

    def test_a_worker_whose_start_has_no_end_that_can_be_seen_has_no_page(self):
        _, (_, _, base, _) = fake.load("0.32.0", self.dir)
        worker = importlib.import_module("npu").Renamed(fake.config(2), 0, 1)
        base.WorkerWrapperBase(worker).warm_up()
        self.assertEqual(self.pages(), [])
        self.assertTrue(any("hook missing: Renamed.compile_or_warm_up_model" in line for line in self.told))

    def test_one_process_for_core_and_worker_has_one_page(self):
        for name in ("UniProcExecutor", "OneProcess"):
            with self.subTest(name=name):
                _, (executor, core, _, gpu) = fake.load("0.32.0", self.dir)
                kind = executor.UniProcExecutor
                core.EngineCoreProc(fake.config(), kind if kind.__name__ == name else type(name, (kind,), {}))
                gpu.Worker(fake.config(), 0, 0)
                self.assertEqual(self.pages(), ["rank-0.beat"])
                self.assertEqual(self.page()["world_size"], 1)

    def test_a_worker_beside_a_core_without_a_page_does_not_take_another_engine_s(self):
        def rename(modules):
            core = modules["vllm.v1.engine.core"].EngineCoreProc
            core.other = core.run_busy_loop
            del core.run_busy_loop
        _, (executor, core, _, gpu) = fake.load("0.32.0", self.dir, rename)
        config = fake.config(engines=2)
        core.EngineCoreProc(config, executor.UniProcExecutor)
        gpu.Worker(config, 0, 0)
        self.assertEqual(self.pages(), [])  # rank 1 is the second engine's core


if __name__ == "__main__":
    unittest.main()
