// Times a prompt and its answer in llama.cpp: node llama_cpp.mjs FOLDER < JOB. `bench.llama_cpp` writes the job and reads the
// answer, both JSON objects. FOLDER has node-llama-cpp in its node_modules.

import {readFileSync} from "node:fs";

const job = JSON.parse(readFileSync(0, "utf8"));
const {getLlama, LlamaLogLevel} = await import(`${process.argv[2]}/node_modules/node-llama-cpp/dist/index.js`);
const llama = await getLlama({gpu: false, build: "never", logLevel: LlamaLogLevel.error, maxThreads: job.threads});
const model = await llama.loadModel({modelPath: job.model});
const context = await model.createContext({
    contextSize: job.tokens.length + job.new_tokens + 1,
    batchSize: 512,
    threads: job.threads,
    flashAttention: job.flash_attention,
    experimentalKvCacheKeyType: job.cache_type,
    experimentalKvCacheValueType: job.cache_type
});
const sequence = context.getSequence();

async function run(tokens) {
    await sequence.clearHistory();
    const answer = [], seconds = [];
    let before = performance.now();
    for await (const token of sequence.evaluate(tokens, {temperature: 0, yieldEogToken: true})) {
        const now = performance.now();
        seconds.push((now - before) / 1e3);
        before = now;
        answer.push(token);
        if (answer.length > job.new_tokens)
            break;
    }
    return {answer, seconds};
}

await run(job.tokens.slice(0, 32)); // reads the weights from the disk
const runs = [];
for (let i = 0; i < job.repeats; i++)
    runs.push(await run(job.tokens));
console.log(JSON.stringify({runs, peak_rss_bytes: 1024 * process.resourceUsage().maxRSS}));
process.exit(0);
