//! Runs a kernel of a few lines under several schedules.

use ptx_run::{Fault, Launch, Memory, Module, Report, Schedule, Stats};

pub const SCHEDULES: [Schedule; 5] = [
    Schedule::RoundRobin,
    Schedule::Random(1),
    Schedule::Random(2),
    Schedule::Late(1),
    Schedule::Late(2),
];

/// An entry with 8-byte parameters `p0`, `p1`, …, loaded into `%rd0`, `%rd1`, …, with `%tid.x` in `%r0`, the
/// lane's byte offset `4 · tid` in `%r1`, and the start of shared memory in `%r2`.
pub fn kernel(parameters: usize, body: &str) -> Module {
    let list: Vec<String> = (0..parameters)
        .map(|at| format!(".param .align 8 .u64 p{at}"))
        .collect();
    let loads: String = (0..parameters)
        .map(|at| format!("ld.param.b64 %rd{at}, [p{at}];\n"))
        .collect();
    let text = format!(
        ".version 8.0\n.target sm_90a\n.extern .shared .align 1024 .b8 window[];\n\
         .visible .entry k({})\n.maxntid 512, 1, 1\n{{\n\
         .reg .pred %p<20>; .reg .b16 %h<20>; .reg .b32 %r<200>; .reg .b64 %rd<20>;\n\
         {loads}mov.u32 %r0, %tid.x;\nshl.b32 %r1, %r0, 2;\nmov.u32 %r2, window;\n{body}\nret;\n}}\n",
        list.join(", ")
    );
    Module::parse(&text).unwrap_or_else(|error| panic!("{error}"))
}

pub fn launch(threads: u32) -> Launch {
    Launch {
        block: [threads, 1, 1],
        shared: 64 << 10,
        limit: 1_000_000,
        ..Launch::default()
    }
}

pub fn run(
    module: &Module,
    launch: &Launch,
    parameters: &[u64],
    memory: &mut Memory,
    schedule: Schedule,
) -> Result<Stats, Box<Report>> {
    let bytes: Vec<u8> = parameters
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect();
    module.launch("k", launch, &bytes, memory, schedule)
}

/// Runs a kernel that writes a word per thread to its first parameter. The result must be equal under all schedules.
pub fn words(threads: u32, body: &str, input: &[u32]) -> Vec<u32> {
    let module = kernel(2, body);
    let mut results = SCHEDULES.map(|schedule| {
        let mut memory = Memory::new();
        let out = memory.allocate(threads as usize * 4);
        let bytes: Vec<u8> = input.iter().flat_map(|value| value.to_le_bytes()).collect();
        let source = memory.allocate_with(&bytes);
        run(
            &module,
            &launch(threads),
            &[out, source],
            &mut memory,
            schedule,
        )
        .unwrap_or_else(|report| panic!("{schedule:?}: {report}"));
        let bytes = memory.read(out, threads as usize * 4).unwrap();
        bytes
            .chunks(4)
            .map(|word| u32::from_le_bytes(word.try_into().unwrap()))
            .collect::<Vec<_>>()
    });
    for other in 1..results.len() {
        assert_eq!(results[0], results[other], "{:?}", SCHEDULES[other]);
    }
    std::mem::take(&mut results[0])
}

/// Stores `%r10` of each thread where [`words`] reads it.
pub const STORE: &str =
    "cvt.u64.u32 %rd10, %r1; add.s64 %rd10, %rd0, %rd10; st.global.b32 [%rd10], %r10;";

/// Runs a kernel that is faulty under all schedules. Returns each report with the text of its line.
pub fn faults(threads: u32, body: &str) -> Vec<(Fault, String)> {
    faults_of(&launch(threads), body)
}

pub fn faults_of(launch: &Launch, body: &str) -> Vec<(Fault, String)> {
    faults_under(&SCHEDULES, launch, body)
}

pub fn faults_under(schedules: &[Schedule], launch: &Launch, body: &str) -> Vec<(Fault, String)> {
    let module = kernel(2, body);
    schedules
        .iter()
        .map(|&schedule| {
            let mut memory = Memory::new();
            let out = memory.allocate(4096);
            let source = memory.allocate_with(&[1; 4096]);
            let report = run(&module, launch, &[out, source], &mut memory, schedule)
                .expect_err(&format!("{schedule:?} reports nothing"));
            let text = report.place.map(|place| place.text).unwrap_or_default();
            (report.fault, text)
        })
        .collect()
}

/// Asserts that all schedules report this fault, at a line that contains `line`.
#[macro_export]
macro_rules! assert_fault {
    ($threads:expr, $body:expr, $pattern:pat $(if $guard:expr)?, $line:expr) => {
        for (fault, line) in $crate::harness::faults($threads, $body) {
            assert!(matches!(&fault, $pattern $(if $guard)?), "{fault}");
            assert!(line.contains($line), "reported at {line:?}: {fault}");
        }
    };
}
