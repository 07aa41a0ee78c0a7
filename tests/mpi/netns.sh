#!/usr/bin/env bash
# Runs a program's ranks on two network namespaces that act as machines, each with a name, an address and a loopback, joined
# by a virtual cable. For MPI they share neither memory nor 127.0.0.1.
#   tests/mpi/netns.sh RANKS_EACH PROGRAM [ARGUMENTS]
# Needs root. If namespaces cannot be created it prints SKIPPED and succeeds.
set -euo pipefail

ranks=$1
shift
a=isoa$$ b=isob$$
work=$(mktemp -d)
cleanup() {
  ip netns del "$a" 2>/dev/null || true
  ip netns del "$b" 2>/dev/null || true
  rm -rf "$work"
}
trap cleanup EXIT

if ! ip netns add "$a" 2>"$work/why" || ! ip netns add "$b" 2>>"$work/why"; then
  echo "SKIPPED (no network namespaces): $(tail -1 "$work/why")"
  exit 0
fi
ip link add "${a}v" netns "$a" type veth peer name "${b}v" netns "$b"
ip -n "$a" addr add 10.77.7.1/24 dev "${a}v"
ip -n "$b" addr add 10.77.7.2/24 dev "${b}v"
for ns in "$a" "$b"; do
  ip -n "$ns" link set lo up
  ip -n "$ns" link set "${ns}v" up
done

# A replacement of ssh for mpirun: a shell in the other namespace.
cat >"$work/agent" <<EOF
#!/usr/bin/env bash
shift
exec ip netns exec $b unshare --uts sh -c "hostname $b; \$*"
EOF
chmod +x "$work/agent"

export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
exec_on_a=(ip netns exec "$a" unshare --uts sh -c "hostname $a; exec \"\$@\"" sh)
"${exec_on_a[@]}" timeout 120 mpirun --mca plm_rsh_agent "$work/agent" --mca btl tcp,self \
  --mca oob_tcp_if_include 10.77.7.0/24 --mca btl_tcp_if_include 10.77.7.0/24 \
  --host "10.77.7.1:$ranks,10.77.7.2:$ranks" --map-by node --oversubscribe -n $((2 * ranks)) "$@"
