"""A test with an engine core of the fake vLLM, and the way of two requests through it that every version goes."""
import os

import fake
from look import records
from plugged import Plugged


class Cored(Plugged):
    def engine(self, version, **how):
        _, (_, core, _, _) = fake.load(version, self.dir, how.pop("before", None), how.pop("register_first", True))
        engine = core.EngineCoreProc(how.pop("config", fake.config()), **how)
        getattr(engine, "run_busy_loop", lambda: None)()
        return engine, core

    def one_way(self, engine, core, batch_queue):
        seen = self.page()
        self.assertEqual((seen["phase"], seen["world_size"], seen["step_started_ns"]), ("idle", 2, 0))
        engine.add_request(core.Request("a", 700, 3))
        engine.add_request(core.Request("b", 1, 2))
        during = []
        engine.scheduler.update_from_output = self.spied(engine.scheduler.update_from_output, during)
        while engine.scheduler.requests or (batch_queue and engine.batch_queue.count()):
            engine._process_engine_step()
        first = during[0]
        # 512 of the first prompt and the whole of the second; 701 are owed until the step has ended
        self.assertEqual((first["phase"], first["phase_tokens"], first["prompt_tokens_owed"]), ("prefill", 513, 701))
        self.assertEqual((first["running"], first["waiting"]), (2, 0))
        self.assertGreater(first["step_started_ns"], 0)
        # with a queue the next batch is with the workers as well
        self.assertEqual(first["lease_ms"], 120_000 + (7_010 if batch_queue else 5_130))
        self.assertEqual((during[1]["phase_tokens"], during[1]["prompt_tokens_owed"]), (188, 188))
        self.assertEqual((during[2]["phase"], during[2]["phase_tokens"], during[2]["lease_ms"]), ("decode", 0, 120_000))
        last = self.page()
        self.assertEqual((last["steps_completed"], last["tokens_delivered"], last["requests_finished"]), (len(during), 5, 2))
        self.assertEqual((last["phase"], last["running"], last["waiting"], last["prompt_tokens_owed"]), ("idle", 0, 0, 0))
        self.assertEqual(last["step_started_ns"], 0)
        lines = records(os.path.join(self.dir, "rank-0.beat"))
        # a request that decodes gets its next token only with the last one, where the batches are those of a pipeline
        alone = batch_queue and not core.OVERLAPS
        sizes = [(513, 0), (188, 0), (0, 1)] if alone else [(513, 0), (188, 1), (0, 1)]
        self.assertEqual([(line["prefill_tokens"], line["decode_tokens"]) for line in lines][:3], sizes)

    def spied(self, original, during):
        def spy(*args):
            during.append(self.page())
            return original(*args)
        return spy
