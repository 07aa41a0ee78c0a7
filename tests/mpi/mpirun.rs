//! Starts `mpirun` on this program and reads the output of its ranks.

use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

/// The time limit of a job, far above any deadline in it.
const LIMIT: Duration = Duration::from_secs(120);

/// The program and the number of ranks; without ranks it runs without a launcher.
pub struct Job {
    ranks: usize,
    vars: Vec<(String, String)>,
    recovering: bool,
}

/// The outcome of a job.
#[derive(Debug)]
pub struct Run {
    /// The output of each rank.
    pub lines: Vec<Vec<String>>,
    pub code: Option<i32>,
    pub took: Duration,
    /// The whole output, for messages.
    #[allow(dead_code, reason = "shown by Debug")]
    text: String,
}

impl Job {
    pub fn new(ranks: usize, program: &str) -> Job {
        Job { ranks, vars: vec![("ISOSHARD_CHILD".into(), program.into())], recovering: false }
    }

    /// Sets the rank that deviates and the call at which it does.
    pub fn culprit(self, rank: usize, at: usize) -> Job {
        self.with("ISOSHARD_CHILD_CULPRIT", &rank.to_string()).with("ISOSHARD_CHILD_AT", &at.to_string())
    }

    pub fn with(mut self, name: &str, value: &str) -> Job {
        self.vars.push((name.into(), value.into()));
        self
    }

    pub fn and(self, vars: &[(&str, &str)]) -> Job {
        vars.iter().fold(self, |job, (name, value)| job.with(name, value))
    }

    /// Sets the deadline of a job that nothing disturbs to `seconds`, so that a loaded machine does not either.
    pub fn patient(self, seconds: u64) -> Job {
        self.with("ISOSHARD_CHILD_DEADLINE_S", &seconds.to_string())
    }

    /// The end of one rank does not end the others.
    pub fn recovering(mut self) -> Job {
        self.recovering = true;
        self
    }

    /// Runs the job, or prints SKIPPED and returns `None` if there is no `mpirun`.
    pub fn run(self) -> Option<Run> {
        if !has_mpirun() {
            eprintln!("SKIPPED (no mpirun)");
            return None;
        }
        let program = std::env::current_exe().expect("this program has a path");
        let mut command = match self.ranks {
            0 => Command::new(&program),
            n => {
                let mut command = Command::new("mpirun");
                command.args(["--oversubscribe", "-n", &n.to_string()]);
                if self.recovering {
                    command.args(["--enable-recovery", "--mca", "orte_abort_on_non_zero_status", "0"]);
                }
                command.arg(&program);
                command
            }
        };
        command.args(["--exact", "child", "--nocapture"]);
        command.envs(self.vars.clone()).env_remove("RUST_BACKTRACE");
        // Only containers, which have no other user, run this as root.
        command.envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")]);
        let began = Instant::now();
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("mpirun starts");
        let (out, err) = (reader(child.stdout.take()), reader(child.stderr.take()));
        let code = wait(&mut child);
        let (out, err) = (out.join().expect("it only reads"), err.join().expect("it only reads"));
        let mut lines = vec![Vec::new(); self.ranks.max(2)];
        for (rank, line) in out.lines().filter_map(|line| line.split_once('@')?.1.split_once(' ')) {
            lines[rank.parse::<usize>().expect("a rank")].push(line.to_string());
        }
        lines.truncate(self.ranks.max(if self.ranks == 0 { 2 } else { 1 }));
        Some(Run { lines, code, took: began.elapsed(), text: format!("{out}\n{err}") })
    }
}

/// Returns the one line that each rank printed.
pub fn one_line_each(run: &Run, ranks: usize) -> Vec<String> {
    assert_eq!(run.lines.len(), ranks);
    assert!(run.lines.iter().all(|lines| lines.len() == 1), "not one line each: {run:#?}");
    run.lines.iter().map(|lines| lines[0].clone()).collect()
}

fn has_mpirun() -> bool {
    static HAS: OnceLock<bool> = OnceLock::new();
    *HAS.get_or_init(|| {
        let asked =
            Command::new("mpirun").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
        asked.is_ok_and(|status| status.success())
    })
}

fn reader(from: Option<impl Read + Send + 'static>) -> thread::JoinHandle<String> {
    let mut from = from.expect("piped");
    thread::spawn(move || {
        let mut bytes = Vec::new();
        // The output until the pipe broke is all there is.
        let _ = from.read_to_end(&mut bytes);
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

fn wait(child: &mut Child) -> Option<i32> {
    let began = Instant::now();
    loop {
        if let Some(status) = child.try_wait().expect("a child can be waited for") {
            return status.code();
        }
        if began.elapsed() > LIMIT {
            child.kill().expect("a child can be killed");
            panic!("a job hangs");
        }
        thread::sleep(Duration::from_millis(5));
    }
}
