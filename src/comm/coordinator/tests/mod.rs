//! Ranks that meet, and other connections to rank 0's port.

mod admitted;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use super::admission::ClientHello;
use super::auth::{Greeting, Keys};
use super::frame;
use super::message::{Answer, FirstFault, JoinRequest, Message};
use super::{Client, Rendezvous};
use crate::comm::launch::{Launch, Secret, SecretSource};
use crate::error::Result;

const SHORT: Duration = Duration::from_millis(400);
const LONG: Duration = Duration::from_secs(20);
const SECRET: &str = "the secret of this job";

fn secret() -> Secret {
    Secret::from_text(SECRET, "test").unwrap()
}

/// A launch with the tests' secret.
fn launch(rank: usize, world_len: usize, port: u16) -> Launch {
    Launch {
        by: "test",
        rank,
        world_len,
        local_rank: rank,
        local_len: None,
        host: Some("127.0.0.1".into()),
        port,
        bind: None,
        secret: SecretSource::Value(secret()),
    }
}

fn without_secret(launch: Launch) -> Launch {
    Launch { secret: SecretSource::None, ..launch }
}

/// A port that was free a moment ago.
fn port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn meet(launch: &Launch, deadline: Duration) -> Result<Client> {
    Rendezvous { launch, library: "test 1.0", deadline, insecure: false }.meet()
}

fn meet_all(launches: &[Launch], deadline: Duration) -> Vec<Result<Client>> {
    thread::scope(|s| {
        let all: Vec<_> = launches.iter().map(|launch| s.spawn(move || meet(launch, deadline))).collect();
        all.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

fn all_of(n: usize) -> Vec<Client> {
    let port = port();
    let launches: Vec<Launch> = (0..n).map(|rank| launch(rank, n, port)).collect();
    meet_all(&launches, LONG).into_iter().map(Result::unwrap).collect()
}

fn texts(met: Vec<Result<Client>>) -> Vec<String> {
    met.into_iter().map(|m| m.unwrap_err().to_string()).collect()
}

/// A connection to rank 0, which may not listen yet.
fn knock(port: u16) -> TcpStream {
    let end = Instant::now() + LONG;
    loop {
        match TcpStream::connect(("127.0.0.1", port)) {
            Ok(stream) => return stream,
            Err(e) if Instant::now() > end => panic!("nobody listens: {e}"),
            Err(_) => thread::sleep(Duration::from_millis(1)),
        }
    }
}

/// Connects with the right protocol, claims a rank with the given secret, and returns rank 0's answer.
fn claim(port: u16, secret: Option<&Secret>, join: &JoinRequest) -> (TcpStream, Keys, Option<Answer>) {
    let mut stream = knock(port);
    stream.set_read_timeout(Some(LONG)).unwrap();
    let mut theirs = [0; Greeting::BYTES];
    stream.read_exact(&mut theirs).unwrap();
    let (theirs, ours) = (Greeting::decode(&theirs).unwrap(), Greeting::fresh().unwrap());
    let mut keys = Keys::of(secret, &theirs, &ours);
    let mut hello = ours.encode().to_vec();
    frame::seal(join, &mut keys.to_coordinator, JoinRequest::BYTES, &mut hello).unwrap();
    stream.write_all(&hello).unwrap();
    let answer = frame::receive(&mut stream, &mut keys.from_coordinator, 1 << 20, &mut vec![]).ok();
    (stream, keys, answer)
}

fn join(rank: usize, world_len: usize) -> JoinRequest {
    JoinRequest { rank, world_len, process: 1, library: "test 1.0".into() }
}

#[test]
fn all_who_meet_hear_each_other() {
    for n in [1, 2, 5] {
        let met = all_of(n);
        met[n - 1].put("key".into(), vec![7]);
        met.iter().for_each(|client| assert_eq!(client.get("key", LONG), Some(vec![7])));
        met[n / 2].tell(Message::Failed { cause: "boom".into() });
        for client in &met {
            let want = FirstFault::Failed { rank: n / 2, cause: "boom".into() };
            assert_eq!(client.wait_for_fault(LONG), Some(want));
            assert_eq!(client.get("nothing", LONG), None, "a first fault ends all waiting");
        }
    }
}

#[test]
fn a_process_that_is_gone_is_named() {
    for gone in [0, 2] {
        let mut met = all_of(3);
        let client = met.remove(gone);
        if gone == 0 {
            // As at the end of a process, the connections close without a message.
            client.hang_up();
        }
        drop(client);
        for client in &met {
            let cause = "its process ended without a word".to_string();
            assert_eq!(client.wait_for_fault(LONG), Some(FirstFault::Failed { rank: gone, cause }));
        }
    }
}

#[test]
fn all_leave_without_a_fault() {
    let met = all_of(3);
    thread::scope(|s| met.iter().for_each(|client| drop(s.spawn(|| client.leave(LONG)))));
    thread::sleep(Duration::from_millis(30));
    met.iter().for_each(|client| assert_eq!(client.first_fault(), None));
}

#[test]
fn who_does_not_come_is_named_by_all() {
    let p = port();
    let got = texts(meet_all(&[launch(0, 4, p), launch(2, 4, p)], SHORT));
    let want = |rank: usize| {
        format!(
            "rendezvous #0 on group world{{0, 1, 2, 3}}: rank(s) [1, 3] did not come within 0.4 s; rank {rank} waited \
             with the address 127.0.0.1:{p}"
        )
    };
    assert_eq!(got, [want(0), want(2)]);
    let p = port();
    let text = &texts(meet_all(&[launch(1, 2, p)], SHORT))[0];
    assert!(text.contains("rank(s) [0] did not come within 0.4 s; rank 1"), "{text}");
}

#[test]
fn who_does_not_belong_is_refused_by_name() {
    let p = port();
    for text in texts(meet_all(&[launch(0, 2, p), launch(1, 3, p)], LONG)) {
        assert!(text.contains("have different world sizes; got rank 1 at 127.0.0.1:"), "{text}");
        assert!(text.contains("counts 3 ranks, rank 0 counts 2; start every rank once"), "{text}");
    }
    let p = port();
    for text in texts(meet_all(&[launch(0, 3, p), launch(1, 3, p), launch(1, 3, p)], LONG)) {
        assert!(text.contains("two processes claim one rank; got rank 1 from 127.0.0.1:"), "{text}");
    }
    let p = port();
    let library = |launch: Launch, library| {
        move || {
            Rendezvous { launch: &launch, library, deadline: LONG, insecure: false }
                .meet()
                .unwrap_err()
                .to_string()
        }
    };
    let other = thread::spawn(library(launch(1, 2, p), "test 2.0"));
    for text in [library(launch(0, 2, p), "test 1.0")(), other.join().unwrap()] {
        assert!(text.contains("different libraries; got test 1.0 at rank 0, test 2.0 at rank 1"), "{text}");
    }
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let p = taken.local_addr().unwrap().port();
    let text = &texts(meet_all(&[launch(0, 2, p)], SHORT))[0];
    assert!(text.starts_with(&format!("rendezvous: rank 0 cannot listen; got 127.0.0.1:{p}: ")), "{text}");
}

/// A connection that claims a rank without the secret, or with another size of the world, does not disturb rank 0,
/// and the real rank is admitted.
#[test]
fn a_stranger_who_claims_a_rank_is_turned_away() {
    let port = port();
    let host = thread::spawn(move || meet(&launch(0, 2, port), LONG));
    let guess = Secret::from_text("another secret, guessed", "test").unwrap();
    for join in [join(1, 2), join(1, 3), join(0, 2), join(usize::MAX, 2)] {
        for secret in [None, Some(&guess)] {
            assert_eq!(claim(port, secret, &join).2, None, "{join:?}");
        }
    }
    let guest = meet(&launch(1, 2, port), LONG).unwrap();
    let host = host.join().unwrap().unwrap();
    // Their messages cause no fault.
    assert_eq!((guest.wait_for_fault(SHORT), host.first_fault()), (None, None));
}

/// A rank with another secret gets its error at once; rank 0 lists the rejected address at its deadline.
#[test]
fn another_secret_is_named_on_both_ends() {
    let port = port();
    let host = thread::spawn(move || meet(&launch(0, 2, port), Duration::from_secs(2)));
    let other = without_secret(launch(1, 2, port));
    let text = meet(&other, LONG).unwrap_err().to_string();
    assert!(
        text.starts_with("rendezvous: rank 0 and this rank do not have the same secret; got rank 1 of 2"),
        "{text}"
    );
    let text = host.join().unwrap().unwrap_err().to_string();
    assert!(text.contains("rank(s) [1] did not come within 2.0 s"), "{text}");
    assert!(text.contains("where it turned away 127.0.0.1:") && text.contains("(another secret)"), "{text}");
}

/// Without a secret nothing proves that a process belongs to the job: a wrong claim only ends itself.
#[test]
fn without_a_secret_a_wrong_claim_is_refused_and_the_others_meet() {
    let port = port();
    let host = thread::spawn(move || meet(&without_secret(launch(0, 2, port)), LONG));
    for (wrong, want) in [(join(1, 3), "different world sizes"), (join(7, 2), "outside the world")] {
        let Some(Answer::Refused { rule, .. }) = claim(port, None, &wrong).2 else {
            panic!("{wrong:?} came in")
        };
        assert!(rule.contains(want), "{rule}");
    }
    meet(&without_secret(launch(1, 2, port)), LONG).unwrap();
    host.join().unwrap().unwrap();
}

#[test]
fn addresses_that_others_reach_want_a_secret() {
    let there =
        |host: &str, rank| without_secret(Launch { host: Some(host.into()), ..launch(rank, 2, 29_555) });
    for rank in [0, 1] {
        let text = meet(&there("192.0.2.1", rank), SHORT).unwrap_err().to_string();
        assert!(text.contains("ranks that other machines can reach need a shared secret"), "{text}");
        assert!(
            text.contains(&format!("got rank {rank} of 2 at 192.0.2.1:29555, and neither ISOSHARD_TOKEN")),
            "{text}"
        );
    }
    let bind = Launch { bind: Some([0, 0, 0, 0].into()), ..there("127.0.0.1", 0) };
    assert!(meet(&bind, SHORT).unwrap_err().to_string().contains("need a shared secret"));
    // With a secret or the insecure option the address is tried; this machine does not have it.
    let tried = Launch { secret: SecretSource::Value(secret()), ..there("192.0.2.1", 0) };
    assert!(
        meet(&tried, SHORT).unwrap_err().to_string().contains("rank 0 cannot listen; got 192.0.2.1:29555")
    );
    let insecure =
        Rendezvous { launch: &there("192.0.2.1", 0), library: "", deadline: SHORT, insecure: true };
    assert!(insecure.meet().unwrap_err().to_string().contains("set ISOSHARD_BIND on rank 0"));
}

#[test]
fn a_name_that_means_this_machine_alone_does_not_serve_several() {
    let several = Launch { host: Some("127.1".into()), local_len: Some(1), ..launch(0, 2, port()) };
    let text = meet(&several, SHORT).unwrap_err().to_string();
    assert!(
        text.contains(
            "on this machine it is 127.0.0.1, which other machines cannot reach; set ISOSHARD_BIND"
        ),
        "{text}"
    );
}

#[test]
fn strangers_disturb_nobody() {
    let port = port();
    let strange = thread::spawn(move || {
        // One connection sends nothing, one uses another protocol, one announces more bytes than it sends.
        let silent = knock(port);
        knock(port).write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        knock(port).write_all(&[255; 64]).unwrap();
        silent
    });
    let host = thread::spawn(move || meet(&launch(0, 2, port), LONG));
    let silent = strange.join().unwrap();
    meet(&launch(1, 2, port), LONG).unwrap();
    host.join().unwrap().unwrap();
    drop(silent);
    // Another program answers at rank 0's address before rank 0 listens.
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = other.local_addr().unwrap().port();
    thread::spawn(move || {
        for stream in other.incoming() {
            let mut stream = stream.unwrap();
            stream.write_all(&[9; Greeting::BYTES]).unwrap();
            let _ = stream.read(&mut [0; 256]);
        }
    });
    let text = &texts(meet_all(&[launch(1, 2, port)], LONG))[0];
    assert!(
        text.starts_with("rendezvous: another program listens at rank 0's address; got an answer"),
        "{text}"
    );
}

/// Another program at rank 0's address for a moment, such as the rank 0 of a job that ends, does not keep a rank from
/// joining later.
#[test]
fn a_stranger_at_the_meeting_place_is_not_believed_at_once() {
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = other.local_addr().unwrap().port();
    let guest = thread::spawn(move || meet(&launch(1, 2, port), LONG).map(drop));
    let (mut stream, _) = other.accept().unwrap();
    drop(other);
    let host = thread::spawn(move || {
        let end = Instant::now() + LONG;
        loop {
            match meet(&launch(0, 2, port), LONG) {
                Err(e) if e.to_string().contains("cannot listen") && Instant::now() < end => {}
                met => return met.map(drop),
            }
        }
    });
    thread::sleep(Duration::from_millis(100));
    stream.write_all(&[9; Greeting::BYTES]).unwrap();
    drop(stream);
    guest.join().unwrap().unwrap();
    host.join().unwrap().unwrap();
}

/// Deadlines apply to whole exchanges: a listener that sends a byte now and then cannot extend them.
#[test]
fn bytes_that_trickle_hold_nobody() {
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = other.local_addr().unwrap().port();
    thread::spawn(move || {
        while let Ok((mut stream, _)) = other.accept() {
            let greeting = Greeting::fresh().unwrap().encode();
            // The stream would never end; the rank closes it.
            let mut bytes = greeting.iter().cycle();
            while stream.write_all(&[*bytes.next().unwrap()]).is_ok() {
                thread::sleep(Duration::from_millis(100));
            }
        }
    });
    let began = Instant::now();
    let text = &texts(meet_all(&[launch(1, 2, port)], Duration::from_secs(1)))[0];
    assert!(began.elapsed() < LONG && text.contains("rank(s) [0] did not come within 1.0 s"), "{text}");
}

/// A rank that asks for many values and reads none delays the other ranks for a bounded time and loses its
/// connection.
#[test]
fn a_rank_that_does_not_read_holds_nobody() {
    let port = port();
    let host = thread::spawn(move || meet(&launch(0, 3, port), LONG));
    let (mut deaf, mut keys, _) = claim(port, Some(&secret()), &join(1, 3));
    let reads = thread::spawn(move || meet(&launch(2, 3, port), LONG).unwrap());
    let (reads, host) = (reads.join().unwrap(), host.join().unwrap().unwrap());
    host.put("k".into(), vec![0; 4000]);
    let began = Instant::now();
    // 80 MB of answers exceed all buffers of the connection.
    for _ in 0..20_000 {
        let mut frame = Vec::new();
        frame::seal(&Message::Get { key: "k".into() }, &mut keys.to_coordinator, 1 << 20, &mut frame)
            .unwrap();
        if deaf.write_all(&frame).is_err() {
            break;
        }
    }
    let lost = FirstFault::Failed { rank: 1, cause: "its process ended without a word".into() };
    for client in [&host, &reads] {
        assert_eq!(client.wait_for_fault(LONG), Some(lost.clone()));
    }
    assert!(began.elapsed() < LONG);
}

/// Far more connections than the limit send nothing and stay open: the real rank is still admitted.
#[test]
fn a_crowd_at_the_door_is_bounded_and_the_true_rank_comes_in() {
    let port = port();
    let host = thread::spawn(move || meet(&launch(0, 2, port), LONG));
    let crowd: Vec<TcpStream> = (0..400)
        .filter_map(|_| TcpStream::connect(("127.0.0.1", port)).ok().or_else(|| Some(knock(port))))
        .collect();
    let guest = meet(&launch(1, 2, port), LONG);
    assert!(guest.is_ok(), "{guest:?}");
    host.join().unwrap().unwrap();
    drop(crowd);
}

/// Received bytes are bounded before they are stored.
#[test]
fn a_hello_is_heard_in_any_pieces_and_never_beyond_its_bound() {
    let secret = secret();
    let said = |hello: &ClientHello| {
        let ours = Greeting::fresh().unwrap();
        let mut keys = Keys::of(Some(&secret), &hello.greeting, &ours);
        let mut bytes = ours.encode().to_vec();
        frame::seal(&join(1, 2), &mut keys.to_coordinator, JoinRequest::BYTES, &mut bytes).unwrap();
        bytes
    };
    use super::admission::HelloState;
    for piece in 1..200 {
        let mut hello = ClientHello::new().unwrap();
        let bytes = said(&hello);
        let mut pieces = bytes.chunks(piece).peekable();
        while let Some(piece) = pieces.next() {
            match hello.receive(piece, Some(&secret)) {
                HelloState::Incomplete => assert!(pieces.peek().is_some()),
                HelloState::Authenticated(join, _) => {
                    assert!(pieces.peek().is_none() && join == self::join(1, 2))
                }
                HelloState::Rejected(why) => panic!("{why}"),
                HelloState::Closed => unreachable!("no peer hung up"),
            }
        }
    }
    let mut hello = ClientHello::new().unwrap();
    let bytes = [said(&hello), vec![0]].concat();
    assert!(matches!(hello.receive(&bytes, Some(&secret)), HelloState::Rejected("sends too many bytes")));
    let mut hello = ClientHello::new().unwrap();
    assert!(matches!(
        hello.receive(&vec![b'i'; ClientHello::BYTES + 1], Some(&secret)),
        HelloState::Rejected("sends too many bytes")
    ));
}

/// Rank 0 of two in its own process, which [`in_a_process`] starts.
#[test]
fn rank_0_in_a_process() {
    let Ok(port) = std::env::var("ISOSHARD_TEST_RENDEZVOUS") else { return };
    match meet(&launch(0, 2, port.parse().unwrap()), LONG) {
        Ok(client) => {
            client.leave(LONG);
            println!("met");
        }
        Err(error) => println!("{error}"),
    }
}

/// Starts rank 0 in a shell that sets limits first.
#[cfg(unix)]
fn in_a_process(port: u16, limits: &str) -> std::process::Child {
    use std::process::{Command, Stdio};
    let name = "comm::coordinator::tests::rank_0_in_a_process";
    let line = format!("{limits}; exec \"$0\" --exact {name} --nocapture --test-threads=1");
    let program = std::env::current_exe().unwrap();
    let mut shell = Command::new("sh");
    shell.args(["-c", &line]).arg(program).env("ISOSHARD_TEST_RENDEZVOUS", port.to_string());
    shell.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// More connections than rank 0 has file descriptors stay open: the oldest are closed, and the real rank is admitted.
#[cfg(unix)]
#[test]
fn descriptors_that_run_out_do_not_shut_the_door() {
    let port = port();
    let host = in_a_process(port, "ulimit -n 32");
    let crowd: Vec<TcpStream> = (0..189).map(|_| knock(port)).collect();
    let guest = meet(&launch(1, 2, port), LONG).unwrap();
    guest.leave(LONG);
    let out = host.wait_with_output().unwrap();
    assert!(String::from_utf8_lossy(&out.stdout).contains("met"), "{out:?}");
    drop(crowd);
}

/// If the system refuses threads, connections are still served, and the rank that came gets the reason.
#[cfg(unix)]
#[test]
fn threads_that_are_refused_are_named_to_all() {
    let port = port();
    let host = in_a_process(port, "export RUST_MIN_STACK=1000000000000000");
    let stranger = knock(port);
    let text = meet(&launch(1, 2, port), LONG).unwrap_err().to_string();
    assert!(text.starts_with("rendezvous: rank 0 failed; got the system refuses a thread: "), "{text}");
    let out = host.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&out.stdout);
    assert!(said.contains("the transport of rank 0 failed: the system refuses a thread: "), "{out:?}");
    drop(stranger);
}
